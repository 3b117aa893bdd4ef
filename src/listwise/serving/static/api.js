// The server's answers. Every failure is a Failure whose message can be shown as it is.

const TOKEN = "listwise-token";

/** What went wrong: `status` of the answer, 0 if there was none; `wait` seconds before a retry. */
export class Failure extends Error {
  constructor(message, status, wait = 0) {
    super(message);
    this.status = status;
    this.wait = wait;
  }
}

let askForToken = async () => null;
let asking = null;

/** Say how a person is asked for the token: `ask(wrong)` gives it, or null. */
export function onTokenNeeded(ask) {
  askForToken = ask;
}

async function send(path, options = {}) {
  const token = sessionStorage.getItem(TOKEN);
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (options.signal?.aborted) throw error;
    throw new Failure("The server does not answer. Is it still running?", 0);
  }
  if (response.ok) return response;
  if (response.status === 401) {
    asking ??= askForToken(token !== null).finally(() => {
      asking = null;
    });
    const given = await asking;
    if (given === null) throw new Failure("This needs the server's token.", 401);
    sessionStorage.setItem(TOKEN, given);
    return send(path, options);
  }
  throw await failure(response);
}

async function failure(response) {
  const wait = Number(response.headers.get("Retry-After")) || 1;
  let told = "";
  try {
    told = (await response.json()).error ?? "";
  } catch {
    // Something between this page and the server answered; the status is all there is.
  }
  const plain = {
    413: "That is too large for this server.",
    503: "The server is busy.",
    504: "That took the server too long.",
  };
  const message = told || plain[response.status] || `The server answered ${response.status}.`;
  return new Failure(sentence(message), response.status, wait);
}

function sentence(text) {
  const line = text.trim();
  return line[0].toUpperCase() + line.slice(1) + (/[.!?]$/.test(line) ? "" : ".");
}

const json = async (path, options) => (await send(path, options)).json();

export const info = () => json("api/info");
export const entry = (key) => json(`api/entries/${key}`);
export const entries = (start, many) => json(`api/entries?start=${start}&count=${many}`);
export const remove = (key) => json(`api/entries/${key}`, { method: "DELETE" });
export const thumbnail = (key) => `api/entries/${key}/thumbnail`;
export const photo = (key) => `api/entries/${key}/photo`;
export const blob = async (path, signal) => (await send(path, { signal })).blob();

/** Put photos into the index. */
export function add(files) {
  const body = new FormData();
  for (const file of files) body.append("photos", file, file.name);
  return json("api/entries", { method: "POST", body });
}

/**
 * Search by photos, each with a box or null, and by entries of the index.
 * @param {{file: Blob, name: string, box: number[]|null}[]} photos
 * @param {string[]} keys
 */
export function search({ photos, keys, k, expand, rerank }, signal) {
  const body = new FormData();
  for (const { file, name } of photos) body.append("photos", file, name);
  body.append("boxes", JSON.stringify(photos.map(({ box }) => box)));
  body.append("keys", JSON.stringify(keys));
  body.append("k", k);
  body.append("expand", expand);
  body.append("rerank", rerank);
  return json("api/search", { method: "POST", body, signal });
}
