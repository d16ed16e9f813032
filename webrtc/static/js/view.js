/** Puts the app's state into the page; reads nothing back from it. */

import { flash, gestures, radios, samples } from "./choices.js";
import { clock } from "./format.js";
import { isOpen, secondsLeft } from "./machine.js";
import { connectionNotice, status } from "./words.js";

export class View {
  #liveSince = null;

  /** @param {(id: string) => HTMLElement} find */
  constructor(find) {
    this.find = find;
    find("full").hidden = !document.fullscreenEnabled;
    this.still = matchMedia("(prefers-reduced-motion: reduce)");
  }

  /** Makes the choices from the server's description. */
  describe(app) {
    const { config } = app.connection;
    const { choice } = app;
    radios(this.find("avatar-list"), {
      name: "avatar",
      values: config.avatars,
      chosen: choice.avatar,
      className: "chip",
      onChoose: (value) => app.choose("avatar", value),
    });
    radios(this.find("state-list"), {
      name: "state",
      values: config.states.filter((state) => state !== "speaking"),
      chosen: choice.state,
      className: "segment",
      onChoose: (value) => app.choose("state", value),
    });
    radios(this.find("step-list"), {
      name: "steps",
      values: config.steps,
      chosen: choice.steps ?? config.default_steps,
      className: "segment",
      text: String,
      onChoose: (value) => app.choose("steps", value),
    });
    gestures(this.find("event-list"), {
      values: config.events,
      onChoose: (value) => app.gesture(value),
    });
    samples(this.find("samples"), {
      values: config.samples,
      onChoose: (value) => app.speakSample(value),
    });
    this.find("samples").hidden = !config.samples.length;
    this.find("avatars").hidden = config.avatars.length < 2;
    this.find("steps").hidden = config.steps.length < 2;
    this.find("events").hidden = !config.events.length;
  }

  /** Draws or lifts the curtain before the picture. */
  shown(on) {
    document.body.toggleAttribute("data-shown", on);
    this.#liveSince = on ? (this.#liveSince ?? performance.now()) : null;
  }

  progress(text) {
    this.find("progress").textContent = text;
  }

  flash(index) {
    flash(this.find("event-list"), index);
  }

  /** Shows everything that follows from the app's state. */
  render(app) {
    const { state, config } = app.connection;
    const { phase } = state;
    document.body.dataset.phase = phase;
    document.body.toggleAttribute("data-speaking", phase === "live" && app.face.speaking);
    setText(this.find("status-word"), status(state, app.face));
    this.#timer();
    this.#controls(app, phase, config);
    this.#buttons(app);
    const problem = connectionNotice(state, secondsLeft(state, performance.now()));
    app.notices.setConnection(problem);
    this.#curtain(state, problem);
  }

  #timer() {
    this.find("timer").hidden = this.#liveSince === null;
    if (this.#liveSince === null) return;
    setText(this.find("timer-text"), clock((performance.now() - this.#liveSince) / 1000));
  }

  #curtain({ phase }, problem) {
    // A problem's own button takes the place of the start button.
    this.find("welcome").hidden =
      problem !== null || !["loading", "idle", "failed"].includes(phase);
    this.find("start").disabled = phase === "loading";
    this.find("token-form").hidden = phase !== "locked";
    this.find("still").hidden = !["waiting", "reconnecting", "connecting"].includes(phase);
    this.find("spinner").hidden = phase !== "connecting" && phase !== "reconnecting";
  }

  #controls(app, phase, config) {
    const canBegin = phase === "idle" || phase === "failed" || phase === "live";
    const live = phase === "live";
    const enabled = {
      mic: canBegin || app.microphone.track !== null,
      file: canBegin,
      stop: live,
      sound: live,
      record: live,
      full: live,
      end: isOpen(app.connection.state),
      text: canBegin && config.text,
      send: canBegin && config.text,
      events: live,
      avatars: canBegin,
      states: canBegin,
      steps: canBegin,
    };
    for (const [id, on] of Object.entries(enabled)) this.find(id).disabled = !on;
    for (const sample of this.find("samples").querySelectorAll("button"))
      sample.disabled = !canBegin;
    this.find("text").placeholder =
      config && !config.text
        ? "Text needs espeak-ng or flite on the server"
        : "Type something to say";
  }

  #buttons(app) {
    const { muted } = app.playback.video;
    press(this.find("mic"), app.microphone.track !== null);
    press(this.find("sound"), !muted);
    press(this.find("record"), app.recorder.active);
    this.find("sound-icon").setAttribute("href", muted ? "#i-muted" : "#i-sound");
    const recorded = app.recorder.active ? clock(app.recorder.seconds) : "Record";
    setText(this.find("record-word"), recorded);
    if (!this.still.matches) {
      this.find("mic-level").style.setProperty("--level", app.microphone.level().toFixed(2));
    }
  }
}

/** Writes only what changed, so that screen readers hear only changes. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function press(button, on) {
  button.setAttribute("aria-pressed", String(on));
}
