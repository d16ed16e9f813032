/** The video element: playing with sound where the browser allows it, and what is seen and heard. */

import { receiveToDisplay } from "./rates.js";
import { loudness, Samples, SilenceMeter } from "./samples.js";

const SPAN_MS = 10_000;

export class Playback {
  /** Milliseconds from each picture's last packet to its display. */
  receiveToDisplay = new Samples(SPAN_MS);
  /** Milliseconds from the last stop to silence, as heard here; null when not measured. */
  stopToSilenceMs = null;
  #context = null;
  #source = null;
  #analyser = null;
  #watch = 0;
  #blocked = false;

  /**
   * @param {HTMLVideoElement} video
   * @param {{onShown: () => void, onBlocked: () => void}} handlers `onShown`: a picture of the
   *   current stream is on screen; `onBlocked`: the browser refuses to play sound.
   */
  constructor(video, { onShown, onBlocked }) {
    this.video = video;
    this.onShown = onShown;
    this.onBlocked = onBlocked;
    // Hidden pages get no frame callbacks.
    video.addEventListener("loadeddata", () => video.videoWidth && onShown());
  }

  /** Keeps the last picture in place of a stream that broke. */
  freeze(canvas) {
    const { videoWidth: width, videoHeight: height } = this.video;
    Object.assign(canvas, { width, height });
    canvas.getContext("2d").drawImage(this.video, 0, 0);
  }

  /** To be called from a click: from then on the page may make sound. */
  unlock() {
    this.#context ??= new AudioContext();
    this.#context.resume();
  }

  /** Shows a stream; after a broken one only once it moves, so the last picture stays till then. */
  async show(stream) {
    this.#watch += 1;
    const [picture] = stream.getVideoTracks();
    if (!this.video.srcObject || !picture.muted) return this.#attach(stream);
    const turn = this.#watch;
    const attach = () => turn === this.#watch && this.#attach(stream);
    picture.addEventListener("unmute", attach, { once: true });
  }

  async #attach(stream) {
    this.receiveToDisplay.clear();
    if (this.#blocked) this.video.muted = this.#blocked = false; // there may have been a click since
    this.video.srcObject = stream;
    this.#listen(stream);
    this.#follow();
    try {
      await this.video.play();
    } catch (error) {
      if (error.name === "NotAllowedError") await this.#playMuted();
      else if (error.name !== "AbortError") throw error; // replaced by a newer stream
    }
  }

  hide() {
    this.#watch += 1;
    this.#source?.disconnect();
    this.#source = null;
    this.#analyser = null;
    this.video.srcObject = null;
  }

  setMuted(muted) {
    this.#blocked = false;
    this.video.muted = muted;
    if (!muted) this.unlock();
  }

  /** Measures from now to silence, if something can be heard now. */
  measureStop() {
    const buffer = this.#analyser && new Float32Array(this.#analyser.fftSize);
    if (!buffer || this.#context.state !== "running") return;
    const meter = new SilenceMeter(performance.now());
    const read = () => {
      if (!this.#analyser) return;
      this.#analyser.getFloatTimeDomainData(buffer);
      const result = meter.read(performance.now(), loudness(buffer));
      if (result === undefined) setTimeout(read, 10);
      else if (result !== null) this.stopToSilenceMs = result;
    };
    read();
  }

  async #playMuted() {
    this.video.muted = this.#blocked = true;
    this.onBlocked();
    await this.video.play();
  }

  #listen(stream) {
    this.#source?.disconnect();
    if (!this.#context) return;
    this.#source = this.#context.createMediaStreamSource(stream);
    this.#analyser = new AnalyserNode(this.#context, { fftSize: 512 });
    this.#source.connect(this.#analyser);
  }

  #follow() {
    this.#watch += 1;
    const turn = this.#watch;
    if (!("requestVideoFrameCallback" in this.video)) return;
    const seen = (now, metadata) => {
      if (turn !== this.#watch) return;
      this.receiveToDisplay.add(now, receiveToDisplay(metadata) ?? NaN);
      this.onShown();
      this.video.requestVideoFrameCallback(seen);
    };
    this.video.requestVideoFrameCallback(seen);
  }
}
