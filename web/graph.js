// Nodes by the id under which the server runs them: "5", or "12:5" for node 5 inside the subgraph node 12.

/** The node of an execution id; null for one that this graph does not hold. */
export function nodeOf(graph, id) {
  const parts = String(id).split(":");
  const last = parts.pop();
  let place = graph;
  for (const part of parts) place = place?.getNodeById(part)?.subgraph;
  return place?.getNodeById(last) ?? null;
}
