/** The server's HTTP routes. Every failure is thrown as a `Trouble`. */

import { fromAnswer, Trouble } from "./problems.js";

export class Api {
  /** @param {string | null} token bearer token, or null where the server wants none. */
  constructor(token = null) {
    this.token = token;
  }

  config() {
    return this.#json("GET", "/config");
  }

  /**
   * Opens a session, or moves one to a new connection when `resume` is its token.
   *
   * @param {{sdp: string, spec: object, resume: string | null}} offer
   */
  offer({ sdp, spec, resume }) {
    return this.#json("POST", "/offer", {
      type: "offer",
      sdp,
      ...(resume ? { resume } : { spec }),
    });
  }

  async candidates(url, candidates) {
    await this.#request("PATCH", url, {
      body: JSON.stringify({ candidates }),
      headers: { "Content-Type": "application/json" },
    });
  }

  /** A sound that comes with the server, as a file. */
  async sample(name) {
    const answer = await this.#request("GET", `/samples/${encodeURIComponent(name)}`);
    return new File([await answer.blob()], name, { type: answer.headers.get("Content-Type") });
  }

  /** Sends a sound file to be spoken; resolves when the server has taken it. */
  async speakFile(url, file) {
    const headers = { "Content-Type": file.type || "application/octet-stream" };
    const answer = await this.#request("POST", `${url}/audio`, { body: file, headers });
    return answer.json();
  }

  /** Ends a session; also works while the page is being left. */
  async remove(url) {
    await this.#request("DELETE", url, { keepalive: true });
  }

  async #json(method, url, body) {
    const options = body && {
      body: JSON.stringify(body),
      headers: { "Content-Type": "application/json" },
    };
    return (await this.#request(method, url, options)).json();
  }

  async #request(method, url, options = {}) {
    const headers = { ...options.headers };
    if (this.token) headers.Authorization = `Bearer ${this.token}`;
    const request = fetch(url, { cache: "no-store", ...options, method, headers });
    const answer = await request.catch((error) => {
      throw new Trouble({ kind: "unreachable", detail: error.message });
    });
    if (answer.ok) return answer;
    const isJson = answer.headers.get("Content-Type")?.includes("json");
    const body = isJson ? await answer.json().catch(() => null) : null;
    throw new Trouble(fromAnswer(answer.status, answer.headers.get("Retry-After"), body));
  }
}
