// Shows on Carnator's nodes what happened in the last run. One DOM widget a node, nothing saved with the workflow.

import { app } from "../../scripts/app.js";
import { api } from "../../scripts/api.js";
import { nodeOf } from "./graph.js";
import { afterReport, afterStep, EMPTY } from "./state.js";
import { addStyles, createView, HEIGHT } from "./widget.js";

const SHOWING = new Set(["Carnator", "CarnatorCompatibilityGate", "CarnatorReport"]);
const WIDTH = 300; // CSS pixels below which the words no longer fit
const KEPT = 100; // states, the oldest forgotten first

const views = new WeakMap(); // by node
const states = new Map(); // by workflow and execution id: undo and reload make new nodes for the same ids

function root() {
  return app.rootGraph ?? app.graph;
}

function keyOf(id) {
  return `${root()?.id ?? ""}/${id}`;
}

function addView(node) {
  const view = createView();
  const widget = node.addDOMWidget("carnator_view", "carnator_view", view.element, {
    serialize: false, // not in the prompt
    hideOnZoom: true,
    getMinHeight: () => HEIGHT,
    getMaxHeight: () => HEIGHT,
  });
  widget.serialize = false; // not in the workflow
  views.set(node, view);
  const [width, height] = node.computeSize();
  node.setSize([Math.max(WIDTH, width, node.size[0]), Math.max(height, node.size[1])]);
}

/** The next state of the node that the server calls `id`; ids of other graphs and nodes are ignored. */
function update(id, change) {
  const view = views.get(nodeOf(root(), id));
  if (!view) return;
  const key = keyOf(id);
  const state = change(states.get(key) ?? EMPTY);
  states.delete(key);
  states.set(key, state);
  if (states.size > KEPT) states.delete(states.keys().next().value);
  view.show(state);
}

function showRemembered() {
  const prefix = keyOf("");
  for (const [key, state] of states) {
    if (key.startsWith(prefix)) views.get(nodeOf(root(), key.slice(prefix.length)))?.show(state);
  }
}

app.registerExtension({
  name: "carnator.report",
  setup() {
    addStyles();
    api.addEventListener("carnator.step", ({ detail }) => update(detail.node, (state) => afterStep(state, detail)));
    api.addEventListener("carnator.report", ({ detail }) =>
      update(detail.node, (state) => afterReport(state, detail.report)),
    );
    api.addEventListener("executed", ({ detail }) => {
      const found = detail.output?.carnator?.[0]; // of Carnator Report, also when served from ComfyUI's own cache
      if (found) update(detail.display_node ?? detail.node, (state) => afterReport(state, found.report));
    });
  },
  nodeCreated(node) {
    if (SHOWING.has(node.comfyClass)) addView(node);
  },
  afterConfigureGraph: showRemembered,
});
