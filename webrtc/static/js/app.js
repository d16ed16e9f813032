/** The page's behaviour: what each control does, and how the page follows the connection. */

import { Connection } from "./connection.js";
import { bytes, seconds } from "./format.js";
import { Microphone } from "./microphone.js";
import { Notices } from "./notices.js";
import { Panel } from "./panel.js";
import { Playback } from "./playback.js";
import { fromError } from "./problems.js";
import * as protocol from "./protocol.js";
import { Recorder } from "./recorder.js";
import { saveResume, saveToken, takeResume } from "./storage.js";
import { View } from "./view.js";

export class App {
  choice = { avatar: null, state: "idle", steps: null };
  face = protocol.SILENT;
  /** What to do once the control channel is open: a file or a text given before the start. */
  #pending = null;

  /**
   * @param {(id: string) => HTMLElement} find
   * @param {import("./api.js").Api} api
   */
  constructor(find, api) {
    this.find = find;
    this.api = api;
    this.view = new View(find);
    this.notices = new Notices(find, (action) => this.act(action));
    this.connection = new Connection({
      api,
      spec: () => this.#spec(),
      onChange: (state, before) => this.#changed(state, before),
      onStream: (stream) => this.#show(stream),
      onOpen: () => this.#opened(),
      onMessage: (message) => this.#receive(message),
    });
    this.playback = new Playback(find("video"), {
      onShown: () => this.connection.dispatch({ type: "playing" }),
      onBlocked: () => this.#blocked(),
    });
    this.microphone = new Microphone((problem) => this.#microphoneEnded(problem));
    this.recorder = new Recorder(() => this.refresh());
    this.panel = new Panel(find, this.connection, this.playback);
    setInterval(() => this.refresh(), 250);
  }

  get live() {
    return this.connection.state.phase === "live";
  }

  /** Whether control messages arrive at a session that is on screen. */
  get open() {
    return this.live && this.connection.peer.open;
  }

  /** Carries out an action of a button, a notice or a key. */
  act(action) {
    const [name, argument] = action.split(":");
    const actions = {
      start: () => this.start(),
      retry: () => this.retry(),
      reload: () => location.reload(),
      dismiss: () => this.notices.dismiss(),
      unmute: () => this.setMuted(false),
      mic: () => this.toggleMicrophone(),
      file: () => this.find("file-input").click(),
      stop: () => this.stop(),
      text: () => this.find("text").focus(),
      record: () => this.toggleRecording(),
      sound: () => this.setMuted(!this.playback.video.muted),
      help: () => this.find("help").showModal(),
      full: () => this.#fullScreen(),
      end: () => this.connection.dispatch({ type: "end" }),
      gesture: () => this.gesture(this.connection.config.events[Number(argument)]),
    };
    actions[name]();
  }

  load() {
    this.connection.load();
  }

  start(resumeToken = null) {
    if (!globalThis.RTCPeerConnection) return this.notices.show({ kind: "no_webrtc" });
    this.playback.unlock();
    this.notices.dismiss();
    this.connection.dispatch({ type: "start", resumeToken });
  }

  retry() {
    if (this.connection.state.phase === "failed") this.start();
    else this.connection.dispatch({ type: "retry_now" });
  }

  unlock(token) {
    saveToken(token);
    this.api.token = token;
    this.connection.dispatch({ type: "unlock" });
    this.start();
  }

  stop() {
    if (!this.live) return;
    this.playback.measureStop();
    this.connection.send(protocol.stop());
    this.view.progress("");
  }

  gesture(event) {
    if (!this.connection.send(protocol.triggerEvent(event))) return;
    this.view.flash(this.connection.config.events.indexOf(event));
  }

  choose(key, value) {
    this.choice[key] = value;
    const messages = {
      avatar: protocol.setAvatar,
      state: protocol.setState,
      steps: protocol.setQuality,
    };
    const message = messages[key](value);
    if (this.connection.send(message)) this.face = protocol.face(this.face, message);
    this.refresh();
  }

  /** Has a text spoken; starts a session if there is none. */
  say(text) {
    this.#whenOpen(() => this.connection.send(protocol.speak(text)));
  }

  /** Has a sound file spoken; starts a session if there is none. */
  speakFile(file) {
    const limit = this.connection.config?.limits.upload_bytes;
    if (limit && file.size > limit) {
      return this.notices.show({ kind: "too_large", size: file.size, limit });
    }
    this.#whenOpen(() => this.#upload(file));
  }

  /** Has a sound of the server spoken; starts a session if there is none. */
  speakSample(name) {
    this.#whenOpen(async () => {
      try {
        await this.#upload(await this.api.sample(name));
      } catch (error) {
        this.notices.show(fromError(error));
      }
    });
  }

  async toggleMicrophone() {
    if (this.microphone.track) {
      this.microphone.stop();
      await this.#connectMicrophone();
    } else {
      try {
        await this.microphone.start();
        if (this.open) await this.#connectMicrophone();
        else this.start(); // which connects it once the channel is open
      } catch (error) {
        this.notices.show(fromError(error));
      }
    }
    this.refresh();
  }

  toggleRecording() {
    if (this.recorder.active) return this.recorder.stop();
    if (!this.live) return;
    try {
      this.recorder.start(this.playback.video.srcObject, this.choice.avatar);
    } catch (error) {
      this.notices.show(fromError(error));
    }
    this.refresh();
  }

  setMuted(muted) {
    this.playback.setMuted(muted);
    if (!muted) this.notices.dismiss("autoplay_blocked");
    this.refresh();
  }

  /** The page goes away: the session is kept for a moment, so that a reload finds it again. */
  leave() {
    const { resumeToken } = this.connection.state;
    if (resumeToken) saveResume(resumeToken);
    this.microphone.stop();
    this.recorder.stop();
    this.connection.leave();
  }

  refresh() {
    this.view.render(this);
  }

  #spec() {
    const { avatar, state, steps } = this.choice;
    return { avatar, state, num_inference_steps: steps };
  }

  #changed(state, before) {
    if (before.phase === "loading" && state.phase !== "loading") this.#configured(state);
    if (state.phase === "live") this.#live(before);
    if (before.phase === "live") this.#left();
    if (["idle", "failed", "locked"].includes(state.phase) && before.phase !== "loading") {
      this.#ended();
    }
    this.refresh();
  }

  #configured(state) {
    const { config } = this.connection;
    this.choice.avatar = config.avatars[0] ?? null;
    this.view.describe(this);
    const resume = state.phase === "idle" ? takeResume() : null;
    if (resume) queueMicrotask(() => this.start(resume));
  }

  #live(before) {
    this.view.shown(true);
    this.panel.restart(performance.now() - before.openedAt);
  }

  #left() {
    this.notices.dismiss("autoplay_blocked");
    this.playback.freeze(this.find("still"));
  }

  #ended() {
    this.#pending = null;
    this.face = protocol.SILENT;
    this.microphone.stop();
    this.recorder.stop();
    this.playback.hide();
    this.panel.clear();
    this.view.shown(false);
    this.view.progress("");
  }

  #show(stream) {
    this.recorder.stop();
    this.playback.show(stream);
  }

  #blocked() {
    this.notices.show({ kind: "autoplay_blocked" });
    this.refresh();
  }

  #opened() {
    const pending = this.#pending;
    this.#pending = null;
    if (this.microphone.track) this.#connectMicrophone();
    pending?.();
  }

  #receive(message) {
    this.face = protocol.face(this.face, message);
    this.panel.take(message);
    if (message.type === "finished") this.view.progress(message.interrupted ? "Stopped." : "");
    if (message.type === "error") this.notices.show({ kind: "invalid", detail: message.message });
    this.refresh();
  }

  #whenOpen(action) {
    if (this.open) return action();
    this.#pending = action;
    this.start();
  }

  async #upload(file) {
    this.view.progress(`Sending “${file.name}” (${bytes(file.size)}) …`);
    try {
      const { duration_s: duration } = await this.api.speakFile(
        this.connection.state.location,
        file,
      );
      const length = duration === null ? "" : `, ${seconds(duration)}`;
      this.view.progress(`Speaking “${file.name}”${length}`);
    } catch (error) {
      this.view.progress("");
      const limit = this.connection.config.limits.upload_bytes;
      this.notices.show({ ...fromError(error), name: file.name, size: file.size, limit });
    }
  }

  async #connectMicrophone() {
    const { track } = this.microphone;
    await this.connection.peer?.setMicrophone(track);
    this.connection.send(protocol.microphone(track !== null));
  }

  #microphoneEnded(problem) {
    this.#connectMicrophone();
    this.notices.show(problem);
  }

  #fullScreen() {
    if (document.fullscreenElement) document.exitFullscreen();
    else this.find("stage").requestFullscreen();
  }
}
