/** One RTCPeerConnection: picture and sound in, microphone and control messages out. */

import { CHANNEL, parse } from "./protocol.js";
import { JITTER_START_MS, nextJitterTarget } from "./timing.js";

const GATHER_LIMIT_MS = 500;
const DISCONNECTED_LIMIT_MS = 3_000;

export class Peer {
  #pc;
  #channel;
  #microphone;
  #picture;
  #late = [];
  #trickle = null;
  #disconnected = null;
  #closed = false;

  /**
   * @param {object} options
   * @param {RTCIceServer[]} options.iceServers explicit, also when empty.
   * @param {(stream: MediaStream) => void} options.onStream called once, with both tracks.
   * @param {() => void} options.onOpen the control channel is open.
   * @param {(message: object) => void} options.onMessage a parsed message.
   * @param {(problem: object) => void} options.onLost the connection broke.
   */
  constructor({ iceServers, onStream, onOpen, onMessage, onLost }) {
    this.#pc = new RTCPeerConnection({ iceServers, bundlePolicy: "max-bundle" });
    this.onLost = onLost;
    this.#channel = this.#pc.createDataChannel(CHANNEL);
    this.#channel.onopen = () => this.#closed || onOpen();
    this.#channel.onclose = () => this.#lose("lost");
    this.#channel.onmessage = ({ data }) => this.#receive(data, onMessage);
    // The sender exists from the start, so the microphone needs no second negotiation.
    const sound = this.#pc.addTransceiver("audio", { direction: "sendrecv" });
    const picture = this.#pc.addTransceiver("video", { direction: "recvonly" });
    this.#microphone = sound.sender;
    this.#picture = picture.receiver;
    this.#picture.jitterBufferTarget = JITTER_START_MS;
    onStream(new MediaStream([sound.receiver.track, picture.receiver.track]));
    this.#pc.onicecandidate = ({ candidate }) => this.#found(candidate);
    this.#pc.onconnectionstatechange = () => this.#changed();
  }

  /** The offer's SDP with the candidates found within `GATHER_LIMIT_MS`. */
  async offer() {
    await this.#pc.setLocalDescription();
    await Promise.race([this.#gathered(), sleep(GATHER_LIMIT_MS)]);
    this.#late = [];
    return this.#pc.localDescription.sdp;
  }

  /**
   * Takes the answer, from then on candidates are sent as they are found.
   *
   * @param {string} sdp
   * @param {(candidates: object[]) => Promise<void>} trickle
   */
  async accept(sdp, trickle) {
    await this.#pc.setRemoteDescription({ type: "answer", sdp });
    this.#trickle = trickle;
    if (this.#late.length) await trickle(this.#late.splice(0));
  }

  /** Whether the control channel carries messages. */
  get open() {
    return this.#channel.readyState === "open";
  }

  /** Sends a control message; false if the channel is not open. */
  send(message) {
    if (!this.open) return false;
    this.#channel.send(JSON.stringify(message));
    return true;
  }

  /** @param {MediaStreamTrack | null} track of the microphone. */
  async setMicrophone(track) {
    await this.#microphone.replaceTrack(track);
  }

  /** Holds the picture back by what it is ahead of the sound, in ms. */
  align(avOffsetMs) {
    const target = this.#picture.jitterBufferTarget ?? JITTER_START_MS;
    this.#picture.jitterBufferTarget = nextJitterTarget(target, avOffsetMs);
  }

  async stats() {
    return [...(await this.#pc.getStats()).values()];
  }

  close() {
    this.#closed = true;
    clearTimeout(this.#disconnected);
    this.#channel.close();
    this.#pc.close();
  }

  #receive(data, onMessage) {
    if (this.#closed) return;
    try {
      onMessage(parse(data));
    } catch (error) {
      this.#lose("version", error.message);
    }
  }

  #found(candidate) {
    if (!candidate?.candidate || this.#closed) return;
    const late = candidate.toJSON();
    if (this.#trickle) this.#trickle([late]).catch(() => this.#lose("lost"));
    else this.#late.push(late);
  }

  #changed() {
    clearTimeout(this.#disconnected);
    const state = this.#pc.connectionState;
    if (state === "failed" || state === "closed") this.#lose("lost");
    if (state === "disconnected") {
      this.#disconnected = setTimeout(() => this.#lose("lost"), DISCONNECTED_LIMIT_MS);
    }
  }

  #lose(kind, detail = "") {
    if (!this.#closed) this.onLost({ kind, detail });
  }

  #gathered() {
    return new Promise((resolve) => {
      const check = () => this.#pc.iceGatheringState === "complete" && resolve();
      this.#pc.addEventListener("icegatheringstatechange", check);
      check();
    });
  }
}

function sleep(ms) {
  return new Promise((resolve) => setTimeout(resolve, ms));
}
