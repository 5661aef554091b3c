// The strip: one cell a step, coloured by what the step was.

import { KINDS, stepsWords } from "./state.js";

/** An element and `show(state)`, which changes only the cells that changed. */
export function createStrip() {
  const element = document.createElement("div");
  element.className = "carnator-strip";
  element.setAttribute("role", "img");

  function show(state) {
    while (element.children.length > state.cells.length) element.lastChild.remove();
    while (element.children.length < state.cells.length) element.append(document.createElement("span"));
    state.cells.forEach((kind, index) => {
      const cell = element.children[index];
      const known = kind !== null && kind in KINDS ? kind : "";
      if (cell.dataset.kind === known && cell.title) return;
      cell.dataset.kind = known;
      cell.title = `step ${index + 1}: ${KINDS[kind] ?? (kind === null ? "not done" : String(kind))}`;
    });
    element.classList.toggle("carnator-dense-strip", state.cells.length > 40);
    element.setAttribute("aria-label", stepsWords(state));
  }

  return { element, show };
}
