// Pictures of the index. An <img> cannot send a token: where the server requires one for every
// request, pictures are fetched by script and shown from memory.

import * as api from "./api.js";

const AHEAD = "600px"; // distance from the window at which lazy pictures are fetched

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

/** Set whether pictures require the token. */
export function guardPictures(on) {
  guarded = on;
}

/** An address that an image element can load. */
export function shownAt(path) {
  if (!guarded || path.startsWith("blob:")) return Promise.resolve(path);
  if (!fetched.has(path)) {
    const url = api.blob(path).then((content) => URL.createObjectURL(content));
    fetched.set(path, url);
    url.catch(() => fetched.delete(path));
  }
  return fetched.get(path);
}

/** Show a picture in an image of HTML or SVG; the image gets an error event if it fails. */
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

/** Show a picture in an <img loading="lazy"> when the user scrolls near it. */
export function setLazily(image, path) {
  image.dataset.picture = path;
  if (guarded) watch.observe(image);
  else image.src = path;
}
