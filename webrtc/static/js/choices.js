/** The choices of the face card, made from the server's description. */

import { label } from "./format.js";

/**
 * Fills a group with radio buttons.
 *
 * @param {HTMLElement} box
 * @param {{name: string, values: (string | number)[], chosen: unknown, className: string,
 *   text?: (value: unknown) => string, onChoose: (value: unknown) => void}} options
 */
export function radios(box, { name, values, chosen, className, text = label, onChoose }) {
  const items = values.map((value) => {
    const item = document.createElement("label");
    item.className = className;
    const input = document.createElement("input");
    Object.assign(input, { type: "radio", name, value, checked: value === chosen });
    input.addEventListener("change", () => onChoose(value));
    item.append(input, text(value));
    return item;
  });
  box.replaceChildren(...items);
}

/** Fills a group with buttons that are numbered for the keyboard. */
export function gestures(box, { values, onChoose }) {
  const items = values.map((value, i) => {
    const item = document.createElement("button");
    const key = document.createElement("kbd");
    key.textContent = String(i + 1);
    key.setAttribute("aria-hidden", "true");
    Object.assign(item, { type: "button", className: "chip" });
    item.setAttribute("aria-keyshortcuts", String(i + 1));
    item.append(label(value), key);
    item.addEventListener("click", () => onChoose(value));
    return item;
  });
  box.replaceChildren(...items);
}

/** Appends a button for each sound that the server offers. */
export function samples(box, { values, onChoose }) {
  const items = values.map((value) => {
    const item = document.createElement("button");
    Object.assign(item, { type: "button", className: "chip", textContent: label(value) });
    item.addEventListener("click", () => onChoose(value));
    return item;
  });
  box.replaceChildren(box.firstElementChild, ...items);
}

/** Lights a gesture's button up for as long as a nod takes. */
export function flash(box, index) {
  const button = box.children[index];
  if (!button) return;
  button.classList.add("sent");
  setTimeout(() => button.classList.remove("sent"), 700);
}
