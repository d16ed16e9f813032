/** The two notices over the picture: one of the connection, one that passes. */

import { setText } from "./view.js";
import { notice } from "./words.js";

const PASSING_MS = 12_000;

export class Notices {
  #passingKind = null;
  #timer = null;

  /**
   * @param {(id: string) => HTMLElement} find
   * @param {(action: string) => void} onAction
   */
  constructor(find, onAction) {
    this.connection = find("connection-notice");
    this.passing = find("passing-notice");
    this.onAction = onAction;
  }

  /** Shows the connection's notice, or none. */
  setConnection(content) {
    render(this.connection, content, this.onAction);
  }

  /** Shows a problem for a while; "info" and "warn" close by themselves, errors do not. */
  show(problem) {
    const content = notice(problem);
    this.#passingKind = problem.kind;
    clearTimeout(this.#timer);
    const stays = content.tone === "error" || problem.kind === "autoplay_blocked";
    if (!stays) this.#timer = setTimeout(() => this.dismiss(), PASSING_MS);
    render(this.passing, content, this.onAction);
  }

  /** Hides the passing notice; with a kind, only if it is of that kind. */
  dismiss(kind = this.#passingKind) {
    if (kind !== this.#passingKind) return;
    this.#passingKind = null;
    clearTimeout(this.#timer);
    render(this.passing, null, this.onAction);
  }
}

/** Changes only what differs, so that a countdown takes no focus from the button. */
function render(box, content, onAction) {
  box.hidden = !content;
  if (!content) return box.replaceChildren();
  const { tone, title, body, action, countdown } = content;
  if (box.dataset.key !== `${title}|${action?.id}` || !box.firstChild) {
    box.dataset.key = `${title}|${action?.id}`;
    box.dataset.tone = tone;
    const words = document.createElement("div");
    const strong = document.createElement("strong");
    strong.textContent = title;
    const left = document.createElement("span");
    left.setAttribute("aria-hidden", "true"); // a screen reader would read every second out
    words.append(strong, document.createElement("p"), left);
    box.replaceChildren(words);
    if (action) {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = action.label;
      button.addEventListener("click", () => onAction(action.id));
      box.append(button);
    }
  }
  setText(box.querySelector("p"), body);
  setText(box.querySelector("span"), countdown);
}
