/** Records what is seen and heard into a file on the user's disk. */

import { recordingName } from "./format.js";
import { Trouble } from "./problems.js";

const TYPES = [
  "video/mp4;codecs=avc1.42E01F,opus",
  "video/webm;codecs=h264,opus",
  "video/webm;codecs=vp8,opus",
  "video/webm",
];
const BITS_PER_SECOND = 2_500_000;
const SLICE_MS = 1_000;

export class Recorder {
  #recorder = null;
  #startedAt = 0;

  /** @param {() => void} onStopped the file was handed to the browser. */
  constructor(onStopped) {
    this.onStopped = onStopped;
  }

  get active() {
    return this.#recorder !== null;
  }

  /** Seconds recorded so far. */
  get seconds() {
    return this.active ? (performance.now() - this.#startedAt) / 1000 : 0;
  }

  /**
   * @param {MediaStream} stream
   * @param {string} avatar for the file's name.
   * @throws {Trouble} the browser cannot record.
   */
  start(stream, avatar) {
    const mimeType =
      globalThis.MediaRecorder && TYPES.find((t) => MediaRecorder.isTypeSupported(t));
    if (!mimeType) throw new Trouble({ kind: "no_recorder" });
    const parts = [];
    const options = { mimeType, videoBitsPerSecond: BITS_PER_SECOND };
    const recorder = new MediaRecorder(stream, options);
    const name = recordingName(avatar, new Date(), mimeType.match(/^video\/(\w+)/)[1]);
    recorder.ondataavailable = ({ data }) => data.size && parts.push(data);
    recorder.onstop = () => {
      this.#recorder = null;
      if (parts.length) download(new Blob(parts, { type: mimeType }), name);
      this.onStopped();
    };
    recorder.start(SLICE_MS);
    this.#recorder = recorder;
    this.#startedAt = performance.now();
  }

  stop() {
    if (this.#recorder && this.#recorder.state !== "inactive") this.#recorder.stop();
  }
}

function download(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
