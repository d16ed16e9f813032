/** The user's microphone, on request only; switching it off frees the device. */

import { Trouble } from "./problems.js";
import { loudness } from "./samples.js";
import { microphoneProblem } from "./words.js";

const CONSTRAINTS = { echoCancellation: true, noiseSuppression: true, autoGainControl: true };

export class Microphone {
  track = null;
  #context = null;
  #analyser = null;
  #buffer = null;

  /** @param {(problem: object) => void} onEnded the device went away by itself. */
  constructor(onEnded) {
    this.onEnded = onEnded;
  }

  /**
   * Asks for the microphone.
   *
   * @returns {Promise<MediaStreamTrack>}
   * @throws {Trouble} insecure page, no permission, no device, or a busy one.
   */
  async start() {
    if (!globalThis.isSecureContext || !navigator.mediaDevices) {
      throw new Trouble({ kind: "insecure", host: location.host });
    }
    try {
      const stream = await navigator.mediaDevices.getUserMedia({ audio: CONSTRAINTS });
      [this.track] = stream.getAudioTracks();
    } catch (error) {
      throw new Trouble({ kind: microphoneProblem(error) });
    }
    this.track.onended = () => {
      this.stop();
      this.onEnded({ kind: "mic_missing" });
    };
    this.#meter();
    return this.track;
  }

  stop() {
    this.track?.stop();
    this.track = null;
    this.#context?.close();
    this.#context = this.#analyser = null;
  }

  /** How loud it is, 0 to 1 over the 50 dB below full scale. */
  level() {
    if (!this.#analyser) return 0;
    this.#analyser.getFloatTimeDomainData(this.#buffer);
    const decibel = 20 * Math.log10(loudness(this.#buffer) + 1e-6);
    return Math.min(1, Math.max(0, 1 + decibel / 50));
  }

  #meter() {
    this.#context = new AudioContext();
    this.#analyser = new AnalyserNode(this.#context, { fftSize: 1024 });
    this.#buffer = new Float32Array(this.#analyser.fftSize);
    this.#context.createMediaStreamSource(new MediaStream([this.track])).connect(this.#analyser);
  }
}
