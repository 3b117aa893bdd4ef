// Photos of the user: chosen, pasted or dropped, then checked and measured.

import { count } from "./dom.js";

const megabytes = (bytes) => `${(bytes / 1e6).toFixed(1)} MB`;

/**
 * Create examples from files.
 * @returns {Promise<{examples: Object[], problems: string[]}>} a message for each file that is skipped
 */
export async function readPhotos(files, limits) {
  const read = await Promise.allSettled(files.map((file) => readPhoto(file, limits)));
  return {
    examples: read.filter(({ value }) => value).map(({ value }) => value),
    problems: read.filter(({ reason }) => reason).map(({ reason }) => reason.message),
  };
}

async function readPhoto(file, limits) {
  const name = file.name || "photo";
  if (file.size > limits.upload_bytes) {
    const most = megabytes(limits.upload_bytes);
    throw new Error(`${name} has ${megabytes(file.size)}; the limit is ${most}.`);
  }
  const url = URL.createObjectURL(file);
  try {
    const { width, height } = await measure(url);
    if (width * height > limits.pixels) {
      const [has, most] = [width * height, limits.pixels].map((n) => (n / 1e6).toFixed(1));
      throw new Error(`${name} has ${has} megapixels; the limit is ${most}.`);
    }
    return { name, file, url, preview: url, key: null, width, height, box: null };
  } catch (error) {
    URL.revokeObjectURL(url);
    if (error instanceof DOMException) {
      throw new Error(`${name} cannot be read as a photo. Try a JPEG, PNG or WebP file.`);
    }
    throw error;
  }
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
