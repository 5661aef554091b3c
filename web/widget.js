// The view on a node: decision, seconds saved, risk against its threshold, the steps, the reason.

import { decisionWords, EMPTY, reasonWords, riskWords, savedWords } from "./state.js";
import { createStrip } from "./strip.js";

export const HEIGHT = 138; // CSS pixels with the margins around; fixed, so that a run never moves the nodes below

/** An element and `show(state)`. All text goes through textContent. */
export function createView() {
  const element = box("div", "carnator-view");
  const decision = box("span", "carnator-decision");
  const saved = box("span", "carnator-saved");
  const words = box("span", "carnator-risk-words");
  const risk = box("div", "carnator-risk");
  const fill = box("span", "carnator-risk-fill");
  const mark = box("span", "carnator-risk-mark");
  const reason = box("div", "carnator-reason");
  const strip = createStrip();
  risk.append(fill, mark);
  element.append(row(decision, saved), row(risk, words), strip.element, reason);

  function show(state) {
    element.dataset.phase = state.phase;
    element.dataset.decision = state.decision ?? "";
    setText(decision, decisionWords(state));
    setText(saved, savedWords(state));
    setText(words, riskWords(state));
    setText(reason, reasonWords(state));
    reason.title = reason.textContent;
    const compared = state.risk !== null && state.threshold !== null;
    risk.classList.toggle("carnator-empty", !compared);
    fill.style.width = compared ? percent(state.risk) : "0";
    mark.style.left = compared ? percent(state.threshold) : "0";
    fill.classList.toggle("carnator-over", compared && state.risk > state.threshold);
    strip.show(state);
  }

  show(EMPTY);
  return { element, show };
}

/** Adds the stylesheet beside this file to the page, once. */
export function addStyles() {
  const href = new URL("./carnator.css", import.meta.url).href;
  if ([...document.styleSheets].some((sheet) => sheet.href === href)) return;
  const link = document.createElement("link");
  link.rel = "stylesheet";
  link.href = href;
  document.head.append(link);
}

function box(tag, className) {
  const element = document.createElement(tag);
  element.className = className;
  return element;
}

function row(...children) {
  const element = box("div", "carnator-row");
  element.append(...children);
  return element;
}

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function percent(share) {
  return `${Math.round(1000 * Math.min(1, Math.max(0, share))) / 10}%`;
}
