/** Writes readout.js into the page, once a second. */

import { decimal } from "./format.js";
import { browserRows, serverRows, sparkline, stageRows, tiles } from "./readout.js";
import { rates, snapshot } from "./rates.js";
import { Samples } from "./samples.js";
import { sendToReceive } from "./timing.js";

const HISTORY = 60;
const WAY_SPAN_MS = 30_000;
const emptyHistory = () => ({ fps: [], latency: [], av: [] });

export class Panel {
  #before = null;
  #busy = false;
  #history = emptyHistory();
  #way = new Samples(WAY_SPAN_MS);
  stats = null;
  media = null;
  rates = null;
  firstPictureMs = null;
  #liveSince = 0;

  /**
   * @param {(id: string) => HTMLElement} find
   * @param {import("./connection.js").Connection} connection
   * @param {import("./playback.js").Playback} playback
   */
  constructor(find, connection, playback) {
    this.find = find;
    this.connection = connection;
    this.playback = playback;
    setInterval(() => this.#refresh(), 1_000);
    this.#write();
  }

  /** A new connection came up. */
  restart(firstPictureMs) {
    this.#before = null;
    this.rates = null;
    this.firstPictureMs = firstPictureMs;
    this.#liveSince = performance.now();
    this.#history = emptyHistory();
    this.#way.clear();
  }

  /** Takes "stats" and "media" messages. */
  take(message) {
    if (message.type === "stats") this.stats = message;
    if (message.type === "media") this.media = message;
  }

  clear() {
    this.#before = this.rates = this.stats = this.media = this.firstPictureMs = null;
    this.playback.stopToSilenceMs = null;
    this.#history = emptyHistory();
    this.#way.clear();
    for (const name of Object.keys(this.#history)) this.#plot(name);
    this.#write();
  }

  async #refresh() {
    const { peer, state, clock } = this.connection;
    if (this.#busy || !peer || state.phase !== "live") return;
    this.#busy = true;
    try {
      const now = snapshot(await peer.stats());
      if (peer !== this.connection.peer) return;
      const alive = (performance.now() - this.#liveSince) / 1000;
      this.rates = rates(this.#before, now, alive);
      this.#before = now;
      const { fps, avOffsetMs, processingMs } = this.rates;
      this.#way.add(
        performance.now(),
        sendToReceive(now.video, processingMs, clock.offsetMs) ?? NaN,
      );
      peer.align(avOffsetMs);
      this.#write();
      this.#draw("fps", fps);
      this.#draw("latency", this.#latency().p50);
      this.#draw("av", avOffsetMs);
    } finally {
      this.#busy = false;
    }
  }

  #write() {
    const { receiveToDisplay, stopToSilenceMs } = this.playback;
    const config = this.connection.config;
    const measured = {
      rates: this.rates,
      latency: this.#latency(),
      sendToReceiveMs: this.#way.percentile(50),
      receiveToDisplay: both(receiveToDisplay),
      expectedFps: config?.fps,
      pingMs: this.connection.clock.roundTripMs,
      firstPictureMs: this.firstPictureMs,
      stopToSilenceMs,
      stats: this.stats,
      media: this.media,
    };
    for (const [name, { value, more }] of Object.entries(tiles(measured))) {
      this.find(`n-${name}`).textContent = value;
      this.find(`n-${name}-more`).textContent = more;
    }
    fill(this.find("browser-rows"), browserRows(measured));
    fill(this.find("server-rows"), serverRows(measured));
    this.#stages(config);
  }

  /** Send to display: the way to this computer, and from receipt to the screen. */
  #latency() {
    const way = this.#way.percentile(50);
    const { p50, p95 } = both(this.playback.receiveToDisplay);
    const sum = (rest) => (way === null || rest === null ? null : Math.max(0, way + rest));
    return { p50: sum(p50), p95: sum(p95) };
  }

  #draw(name, value) {
    const values = this.#history[name];
    values.push(value);
    if (values.length > HISTORY) values.shift();
    this.#plot(name);
  }

  #plot(name) {
    const points = sparkline(this.#history[name], HISTORY);
    this.find(`s-${name}`).firstElementChild.setAttribute("points", points);
  }

  #stages(config) {
    if (!config) return;
    const frameMs = 1000 / config.fps;
    const unitMs = frameMs * config.frames_per_unit;
    const rows = stageRows({
      stages: this.stats?.stage_ms,
      encode: this.media?.encode_ms,
      unitMs,
      frameMs,
    });
    this.find("stage-note").textContent = rows.length
      ? `Milliseconds. Bars: p50 and p95 against the ${decimal(unitMs)} ms that ` +
        `${config.frames_per_unit} pictures last; encoding against the ${decimal(frameMs)} ms of one.`
      : "";
    if (rows.length) this.find("stage-rows").replaceChildren(...rows.map(stageRow));
  }
}

function both(samples) {
  return { p50: samples.percentile(50), p95: samples.percentile(95) };
}

function fill(list, rows) {
  if (list.children.length !== rows.length) list.replaceChildren(...rows.map(emptyRow));
  rows.forEach(([label, source, value], i) => {
    const [term, figure] = list.children[i].children;
    term.firstChild.textContent = label;
    term.lastChild.textContent = source;
    figure.textContent = value;
  });
}

function emptyRow() {
  const row = element("div");
  const term = element("dt");
  term.append(element("span"), element("small"));
  row.append(term, element("dd"));
  return row;
}

function stageRow({ name, p50, p95, half, most }) {
  const row = element("tr");
  const track = element("span", "track");
  const bars = [element("u"), element("i")];
  bars[0].style.setProperty("--share", most);
  bars[1].style.setProperty("--share", half);
  track.append(...bars);
  const bar = element("td", "bar");
  bar.append(track);
  row.append(cell(name), bar, cell(p50), cell(p95));
  return row;
}

function cell(text) {
  const data = element("td");
  data.textContent = text;
  return data;
}

function element(tag, className = "") {
  const made = document.createElement(tag);
  if (className) made.className = className;
  return made;
}
