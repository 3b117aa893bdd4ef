// Pictures of the index in the page. A server that asks everyone for its token also asks for it
// here, where an <img> could not send it: then pictures are fetched and shown from memory.

import * as api from "./api.js";

const AHEAD = "600px"; // how far outside the window lazy pictures are fetched

let guarded = false;
const fetched = new Map();
const watch = new IntersectionObserver(
  (seen) => {
    for (const { isIntersecting, target } of seen) {
      if (!isIntersecting) continue;
      watch.unobserve(target);
      setPicture(target, target.dataset.picture);
    }
  },
  { rootMargin: AHEAD },
);

/** Say whether pictures need the token too. */
export function guardPictures(on) {
  guarded = on;
}

/** An address that an image can show. */
export function shownAt(path) {
  if (!guarded || path.startsWith("blob:")) return Promise.resolve(path);
  if (!fetched.has(path)) {
    const url = api.blob(path).then((content) => URL.createObjectURL(content));
    fetched.set(path, url);
    url.catch(() => fetched.delete(path));
  }
  return fetched.get(path);
}

/** Show a picture in an image of HTML or SVG; what cannot be had is an error event, as always. */
export async function setPicture(image, path) {
  image.dataset.picture = path;
  try {
    const address = await shownAt(path);
    if (image.dataset.picture === path) {
      image.setAttribute(image instanceof SVGElement ? "href" : "src", address);
    }
  } catch {
    image.dispatchEvent(new Event("error"));
  }
}

/** Show a picture in an <img loading="lazy"> when the person comes near it. */
export function setLazily(image, path) {
  image.dataset.picture = path;
  if (guarded) watch.observe(image);
  else image.src = path;
}
