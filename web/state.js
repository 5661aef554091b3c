// What a node shows, as plain data: the events of a run in, one state out. No DOM, no ComfyUI.

export const EMPTY = Object.freeze({
  phase: "idle", // idle, running, done
  decision: null,
  cells: [], // the kind of each step, null while it is still to come
  risk: null,
  threshold: null,
  saved: null, // seconds, below 0 when the run took longer
  speedup: null,
  reason: "",
  warnings: [],
});

const WORDS = {
  exact: "Exact hit",
  joint: "Joint hit",
  miss: "Miss",
  off: "Off",
};

export const KINDS = {
  dense: "computed in full",
  skipped: "reused, no model call",
  region: "only the changed region computed",
  sparse: "computed with sparse attention",
  cached: "partly from the model's own cache",
  exact: "taken from the stored result",
};

/** The state after one step event: {index, kind, steps, decision}. */
export function afterStep(state, event) {
  const again = event.index === 0 && state.cells[0] != null; // a run whose end was never told
  const fresh = state.phase !== "running" || state.cells.length !== event.steps || again;
  const cells = fresh ? new Array(Math.max(0, event.steps)).fill(null) : [...state.cells];
  if (event.index >= 0 && event.index < cells.length) cells[event.index] = event.kind;
  // "miss" is what a report says before the gate was asked, so only a hit is told early
  return { ...EMPTY, phase: "running", decision: event.decision === "joint" ? "joint" : null, cells };
}

/** The state of a finished run, from its report; `state` only tells how many steps there were to be. */
export function afterReport(state, report) {
  const rows = report.steps ?? [];
  const known = state.phase === "running" ? state.cells.length : 0;
  const cells = new Array(Math.max(known, ...rows.map((row) => row.index + 1), 0)).fill(null);
  for (const row of rows) cells[row.index] = row.kind;
  return {
    phase: "done",
    decision: report.decision,
    cells,
    risk: number(report.risk),
    threshold: number(report.threshold),
    saved: savedSeconds(report),
    speedup: number(report.speedup),
    reason: report.reason ?? "",
    warnings: report.warnings ?? [],
  };
}

/** Estimated dense seconds less what the model and Carnator took; null where the report cannot tell. */
export function savedSeconds(report) {
  const dense = number(report.dense_seconds);
  if (dense === null || !report.seconds) return null;
  return dense - (report.seconds.model ?? 0) - (report.seconds.carnator ?? 0);
}

export function decisionWords(state) {
  if (state.phase === "idle") return "No run yet";
  return WORDS[state.decision] ?? (state.phase === "running" ? "Sampling" : "Unknown");
}

export function savedWords(state) {
  const { saved, speedup } = state;
  if (saved === null) return "";
  if (Math.abs(saved) < 0.05) return "no time saved";
  const amount = `${Math.abs(saved).toFixed(Math.abs(saved) < 9.95 ? 1 : 0)} s`;
  if (saved < 0) return `${amount} longer`;
  const faster = state.decision !== "exact" && speedup !== null && speedup >= 1.05; // of a run, not of a look-up
  return faster ? `${amount} saved, ${factor(speedup)}x` : `${amount} saved`;
}

export function riskWords(state) {
  if (state.phase === "idle") return "";
  if (state.risk === null || state.threshold === null) return state.phase === "done" ? "no donor compared" : "";
  return `risk ${state.risk.toFixed(2)} of ${state.threshold.toFixed(2)}`;
}

export function reasonWords(state) {
  if (state.phase === "idle") return "Run the workflow to see what is reused.";
  if (state.phase === "running") return "";
  const sentences = [state.reason, ...state.warnings].filter(Boolean).map(sentence);
  return sentences.join(" ");
}

export function stepsWords(state) {
  const { cells } = state;
  if (!cells.length) return "no steps yet";
  const reused = cells.filter((kind) => kind === "skipped" || kind === "exact").length;
  const done = cells.filter((kind) => kind !== null).length;
  const left = cells.length - done;
  return `${cells.length} steps: ${done - reused} computed, ${reused} reused${left ? `, ${left} not done` : ""}`;
}

function factor(value) {
  return value < 9.95 ? value.toFixed(1) : value.toFixed(0);
}

function number(value) {
  return typeof value === "number" && Number.isFinite(value) ? value : null;
}

function sentence(text) {
  const trimmed = String(text).trim();
  return trimmed.charAt(0).toUpperCase() + trimmed.slice(1) + (/[.!?]$/.test(trimmed) ? "" : ".");
}
