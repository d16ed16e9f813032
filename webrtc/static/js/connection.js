/** Carries out the effects of machine.js with real fetches, peers and clocks. */

import { INITIAL, next } from "./machine.js";
import { Peer } from "./peer.js";
import { fromEnding, fromError, offerEvent } from "./problems.js";
import * as protocol from "./protocol.js";
import { ServerClock } from "./timing.js";

const TICK_MS = 250;
/** Heartbeats without any message from the server after which the link counts as broken. */
const MISSED_HEARTBEATS = 3.5;

export class Connection {
  state = INITIAL;
  config = null;
  peer = null;
  clock = new ServerClock();
  #turn = 0;
  #heard = 0;
  #pinged = 0;
  #heartbeatMs = 2_000;

  /**
   * @param {object} options
   * @param {import("./api.js").Api} options.api
   * @param {() => object} options.spec what a new session is to be.
   * @param {(state: object, before: object) => void} options.onChange
   * @param {(stream: MediaStream) => void} options.onStream
   * @param {() => void} options.onOpen the control channel is open.
   * @param {(message: object) => void} options.onMessage messages other than pongs.
   */
  constructor(options) {
    this.options = options;
    setInterval(() => this.#tick(), TICK_MS);
  }

  dispatch(event) {
    const before = this.state;
    const [state, effects] = next(before, { now: performance.now(), ...event });
    this.state = state;
    for (const effect of effects) this.#run(effect);
    if (state !== before) this.options.onChange(this.state, before);
  }

  load() {
    this.#run({ type: "load" });
  }

  send(message) {
    return this.peer?.send(message) ?? false;
  }

  /** Closes the connection without ending the session: the next page may resume it. */
  leave() {
    this.#drop();
  }

  #run(effect) {
    if (effect.type === "load") this.#load();
    if (effect.type === "open") this.#open(effect.resumeToken);
    if (effect.type === "close") this.#close(effect.location);
  }

  async #load() {
    try {
      this.config = await this.options.api.config();
      if (this.config.version !== protocol.VERSION) {
        this.dispatch({ type: "config_failed", problem: { kind: "version" } });
      } else if (!this.config.ready) {
        this.dispatch({ type: "config_failed", problem: { kind: "not_ready" } });
      } else {
        const locked = this.config.auth && !this.options.api.token;
        this.dispatch({ type: "configured", locked });
      }
    } catch (error) {
      this.dispatch({ type: "config_failed", problem: fromError(error) });
    }
  }

  async #open(resume) {
    this.#drop();
    const turn = this.#turn;
    const current = () => turn === this.#turn;
    try {
      const peer = this.#connect(current);
      this.peer = peer;
      const sdp = await peer.offer();
      if (!current()) return;
      const spec = this.options.spec();
      const answer = await this.options.api.offer({ sdp, spec, resume });
      if (!current()) return this.#discard(answer.url);
      this.#heartbeatMs = 1000 * answer.heartbeat_s;
      this.dispatch({ type: "answered", location: answer.url, resumeToken: answer.resume });
      await peer.accept(answer.sdp, (found) => this.options.api.candidates(answer.url, found));
    } catch (error) {
      if (current()) this.dispatch(offerEvent(fromError(error), performance.now()));
    }
  }

  #connect(current) {
    const guarded = (action) => (value) => current() && action(value);
    return new Peer({
      iceServers: this.config.ice_servers,
      onStream: this.options.onStream,
      onOpen: guarded(() => this.#opened()),
      onMessage: guarded((message) => this.#receive(message)),
      onLost: guarded((problem) =>
        this.dispatch({ type: problem.kind === "version" ? "fatal" : "lost", problem }),
      ),
    });
  }

  #opened() {
    this.#heard = performance.now();
    this.#pinged = 0;
    this.options.onOpen();
  }

  #receive(message) {
    this.#heard = performance.now();
    if (message.type === "pong") {
      const now = performance.now();
      const wall = Date.now();
      this.clock.add(wall - (now - message.time_ms), wall, message.server_time_ms);
    } else if (message.type === "session" && message.state === "closed") {
      this.dispatch({ type: "fatal", problem: fromEnding(message.reason) });
    } else if (message.type === "error" && message.fatal) {
      this.dispatch({ type: "fatal", problem: { kind: "failed", detail: message.message } });
    } else {
      this.options.onMessage(message);
    }
  }

  #tick() {
    const now = performance.now();
    if (this.state.phase === "live") {
      if (now - this.#pinged >= this.#heartbeatMs && this.send(protocol.ping(now))) {
        this.#pinged = now;
      }
      if (now - this.#heard > MISSED_HEARTBEATS * this.#heartbeatMs) {
        this.dispatch({ type: "lost", problem: { kind: "lost" } });
      }
    }
    this.dispatch({ type: "tick", now });
  }

  #close(location) {
    this.#drop();
    if (location) this.#discard(location);
  }

  #drop() {
    this.#turn += 1;
    this.#heard = performance.now();
    this.clock.clear();
    this.peer?.close();
    this.peer = null;
  }

  #discard(location) {
    // If it does not get through, the server notices the missing peer by itself.
    this.options.api.remove(location).catch(() => {});
  }
}
