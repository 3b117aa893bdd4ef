// Photos of the user: chosen, pasted or dropped, then checked, and reduced if they are large.

import { byId, count, draw } from "./dom.js";

const LONG_SIDE = 2048; // pixels: a larger photo is reduced before it is sent as a query
const QUALITY = 0.95; // of the JPEG that is sent
// Formats that the server may read where the browser cannot.
const UNSHOWN = /\b(hei[cf]|hif|avif|tiff?)$/i;

const megabytes = (bytes) => `${(bytes / 1e6).toFixed(1)} MB`;

/**
 * Create examples from files. `file` of an example is the photo that is sent as a query, to which
 * its size and box refer, and `original` the file of the user if `file` is a reduced copy of it.
 * @param {number|null} maxSide of photos in the index; null for their original size
 * @returns {Promise<{examples: Object[], problems: string[]}>} a message for each file that is skipped
 */
export async function readPhotos(files, limits, maxSide) {
  const read = [];
  // One after the other: a decoded photo takes much memory.
  for (const file of files) read.push(...(await Promise.allSettled([readPhoto(file, limits, maxSide)])));
  return {
    examples: read.filter(({ value }) => value).map(({ value }) => value),
    problems: read.filter(({ reason }) => reason).map(({ reason }) => reason.message),
  };
}

async function readPhoto(original, limits, maxSide) {
  const name = original.name || "photo";
  const photo = await reducePhoto(original, limits, maxSide);
  if (photo.file.size > limits.upload_bytes) {
    const most = megabytes(limits.upload_bytes);
    throw new Error(`${name} has ${megabytes(photo.file.size)}; the limit is ${most}.`);
  }
  if (photo.unshown && !UNSHOWN.test(name) && !UNSHOWN.test(original.type)) {
    throw new Error(`${name} cannot be read as a photo. Use a JPEG, PNG, WebP, AVIF, GIF, BMP, TIFF or HEIC file.`);
  }
  return withPictures({ name, ...photo, key: null, box: null });
}

/**
 * The photo that is sent as a query, with the size of the upright photo. It is a JPEG file if the
 * photo is large, and `unshown` if the browser cannot decode it. `original` is the file of the user
 * if it is another one that the server accepts.
 */
async function reducePhoto(original, limits, maxSide) {
  let photo;
  try {
    photo = await createImageBitmap(original, { imageOrientation: "from-image" });
  } catch {
    return { file: original, width: 4, height: 3, unshown: true };
  }
  const { width, height } = photo;
  const fits = original.size <= limits.upload_bytes && width * height <= limits.pixels;
  const longest = maxSide === null ? Infinity : Math.max(LONG_SIDE, 2 * maxSide);
  const allowed = fits ? 1 : Math.sqrt((0.99 * limits.pixels) / (width * height));
  let scale = Math.min(1, longest / Math.max(width, height), allowed);
  if (fits && scale === 1) {
    photo.close();
    return { file: original, width, height };
  }
  let size, content;
  do {
    size = [width, height].map((side) => Math.max(1, Math.round(side * scale)));
    content = await encode(photo, size);
    scale *= 0.8;
  } while (content.size > limits.upload_bytes && Math.min(...size) > 1);
  photo.close();
  const { lastModified } = original;
  const name = `${(original.name || "photo").replace(/\.\w+$/, "")}.jpg`;
  const file = new File([content], name, { type: content.type, lastModified });
  return { file, original: fits ? original : undefined, width: size[0], height: size[1] };
}

/** A JPEG file of a photo in another size. */
function encode(photo, size) {
  const canvas = new OffscreenCanvas(...size);
  const context = canvas.getContext("2d");
  context.fillStyle = "white"; // behind transparent parts
  context.fillRect(0, 0, ...size);
  context.imageSmoothingQuality = "high";
  context.drawImage(photo, 0, 0, ...size);
  return canvas.convertToBlob({ type: "image/jpeg", quality: QUALITY });
}

/** An example with the addresses of its pictures, which end with the page. */
export function withPictures(example) {
  const url = URL.createObjectURL(example.unshown ? placeholder(example.name) : example.file);
  return { ...example, url, preview: url };
}

/** A picture with the name of a photo that the browser cannot show. */
function placeholder(name) {
  const short = name.length > 24 ? `${name.slice(0, 12)}…${name.slice(-11)}` : name;
  const text = { x: 200, y: 236, fill: "#fff", "font-family": "sans-serif", "font-size": 26, "text-anchor": "middle" };
  const lines = { transform: "translate(128 66) scale(3)", fill: "none", stroke: "#fff", "stroke-width": 2 };
  const picture = draw(
    "svg",
    { viewBox: "0 0 400 300", width: 400, height: 300 },
    draw("rect", { width: 400, height: 300, fill: "#7d848c" }),
    draw("g", lines, ...byId("icon-photo").cloneNode(true).children),
    draw("text", text, short),
  );
  return new Blob([new XMLSerializer().serializeToString(picture)], { type: "image/svg+xml" });
}

/** Width and height of the upright photo at an address. */
export async function measure(url) {
  const image = new Image();
  image.src = url;
  await image.decode();
  return { width: image.naturalWidth, height: image.naturalHeight };
}

/**
 * Listen for photos that are pasted or dropped anywhere on the page.
 * @param {(files: File[], adding: boolean) => void} onFiles `adding` if dropped onto `addZone`
 * @param {(line: string) => void} onProblem
 */
export function takeIn(veil, addZone, onFiles, onProblem) {
  document.addEventListener("paste", (event) => {
    const files = [...(event.clipboardData?.files ?? [])];
    if (!files.length) return;
    event.preventDefault();
    onFiles(files.map(renamed), false);
  });

  const hasFiles = ({ dataTransfer }) => dataTransfer?.types.includes("Files");
  const hasLink = ({ dataTransfer }) => dataTransfer?.types.includes("text/uri-list");
  // Entering a child element also leaves its parent, so enter and leave events are counted.
  let depth = 0;
  const close = () => {
    depth = 0;
    veil.hidden = true;
  };
  document.addEventListener("dragenter", (event) => {
    if (!hasFiles(event)) return;
    depth += 1;
    veil.hidden = false;
  });
  document.addEventListener("dragleave", (event) => {
    if (hasFiles(event) && --depth <= 0) close();
  });
  document.addEventListener("dragover", (event) => {
    if (!hasFiles(event) && !hasLink(event)) return;
    event.preventDefault();
    event.dataTransfer.dropEffect = "copy";
    addZone.classList.toggle("over", addZone.contains(event.target));
  });
  document.addEventListener("drop", (event) => {
    if (!hasFiles(event) && !hasLink(event)) return;
    event.preventDefault();
    const adding = addZone.contains(event.target);
    close();
    const files = [...event.dataTransfer.files];
    if (files.length) onFiles(files, adding);
    else onProblem("This is a link, not a photo: save the photo and drop its file.");
  });
}

/** Browsers call every pasted photo image.png; the time makes the names different. */
function renamed(file) {
  if (!/^image\.\w+$/.test(file.name)) return file;
  const now = new Date(Date.now() - new Date().getTimezoneOffset() * 60000).toISOString();
  const stamp = now.slice(0, 19).replace("T", " ").replaceAll(":", "-");
  const name = `pasted ${stamp}${file.name.slice(5)}`;
  return new File([file], name, { type: file.type });
}

/** At most `limit` examples, and a message if some are skipped. */
export function limited(examples, limit) {
  if (examples.length <= limit) return { examples, problems: [] };
  const line = `A search can have ${count(limit, "example")} at most: the others are skipped.`;
  return { examples: examples.slice(0, limit), problems: [line] };
}
