/** Starts the page: connects controls, keys, files and the page's own comings and goings. */

import { Api } from "./api.js";
import { App } from "./app.js";
import { action, HELP } from "./keys.js";
import { enableKeys, keysEnabled, readToken } from "./storage.js";

const find = (id) => document.getElementById(id);
const app = new App(find, new Api(readToken()));

const BUTTONS = ["start", "mic", "file", "stop", "sound", "record", "full", "end"];
for (const id of BUTTONS) find(id).addEventListener("click", () => app.act(id));
find("help-button").addEventListener("click", () => app.act("help"));

find("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  app.unlock(find("token").value.trim());
});

// Text: Enter sends, Shift+Enter makes a new line.
find("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = find("text").value.trim();
  if (!text) return;
  app.say(text);
  find("text").value = "";
});
find("text").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  find("composer").requestSubmit();
});

// Files: by the button, or dropped anywhere on the page.
find("file-input").addEventListener("change", ({ target }) => {
  if (target.files.length) app.speakFile(target.files[0]);
  target.value = "";
});
const holdsFile = ({ dataTransfer }) => dataTransfer?.types.includes("Files");
addEventListener("dragover", (event) => {
  if (!holdsFile(event)) return;
  event.preventDefault();
  find("stage").toggleAttribute("data-dropping", true);
});
addEventListener("dragleave", (event) => {
  if (!event.relatedTarget) find("stage").toggleAttribute("data-dropping", false);
});
addEventListener("drop", (event) => {
  if (!holdsFile(event)) return;
  event.preventDefault();
  find("stage").toggleAttribute("data-dropping", false);
  app.speakFile(event.dataTransfer.files[0]);
});

// Keys.
find("keys-on").checked = keysEnabled();
find("keys-on").addEventListener("change", ({ target }) => enableKeys(target.checked));
for (const [key, meaning] of HELP) {
  const [term, words] = [document.createElement("dt"), document.createElement("dd")];
  term.append(Object.assign(document.createElement("kbd"), { textContent: key }));
  words.textContent = meaning;
  find("key-list").append(term, words);
}
addEventListener("keydown", (event) => {
  const wanted = action(event, {
    enabled: keysEnabled(),
    dialogOpen: find("help").open,
    gestures: app.connection.config?.events.length ?? 0,
  });
  const button = wanted && document.getElementById(wanted);
  if (!wanted || button?.disabled) return;
  event.preventDefault();
  app.act(wanted);
});

// Comings and goings.
addEventListener("pagehide", () => app.leave());
addEventListener("pageshow", ({ persisted }) => persisted && location.reload());
addEventListener("online", () => app.connection.dispatch({ type: "retry_now" }));
const phone = matchMedia("(max-width: 560px)");
if (phone.matches) find("live-card").open = false;

app.load();
app.refresh();
