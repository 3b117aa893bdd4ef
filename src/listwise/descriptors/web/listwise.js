// Describes photos in the browser with the model beside this file, by onnxruntime-web.
import * as ort from "./node_modules/onnxruntime-web/dist/ort.wasm.min.mjs";

// Several threads need a page that is isolated from other origins.
if (!self.crossOriginIsolated) ort.env.wasm.numThreads = 1;

const beside = (name) => new URL(name, import.meta.url).href;

/** Load the model; returns its settings and `describe(photo)`. */
export async function loadModel() {
  const answer = await fetch(beside("settings.json"));
  if (!answer.ok) throw new Error(`settings.json: ${answer.status}`);
  const settings = await answer.json();
  const session = await ort.InferenceSession.create(beside("model.onnx"));
  return { settings, describe: (photo) => describe(session, settings, photo) };
}

/** The unit descriptor of a photo (a File, Blob, or image element): Float32Array of settings.dim. */
async function describe(session, settings, photo) {
  const { data, width, height } = await pixels(photo, settings.max_side);
  const count = width * height;
  const values = new Float32Array(3 * count);
  for (let i = 0; i < count; i++)
    for (let channel = 0; channel < 3; channel++)
      values[channel * count + i] = data[4 * i + channel] / 255;
  const images = new ort.Tensor("float32", values, [1, 3, height, width]);
  const { descriptors } = await session.run({ images }, ["descriptors"]);
  return descriptors.data;
}

/** The upright pixels of a photo, reduced to a long side, on white where it is transparent. */
async function pixels(photo, maxSide) {
  const bitmap = await createImageBitmap(photo, { imageOrientation: "from-image" });
  const factor = maxSide ? Math.min(1, maxSide / Math.max(bitmap.width, bitmap.height)) : 1;
  const [width, height] = [bitmap.width, bitmap.height].map((side) =>
    Math.max(1, Math.round(side * factor)),
  );
  const canvas = new OffscreenCanvas(width, height);
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.fillStyle = "white";
  context.fillRect(0, 0, width, height);
  context.imageSmoothingQuality = "high";
  context.drawImage(bitmap, 0, 0, width, height);
  bitmap.close();
  return context.getImageData(0, 0, width, height);
}

/** The similarity of two descriptors: their cosine, from -1 to 1. */
export function similarity(a, b) {
  return a.reduce((sum, value, i) => sum + value * b[i], 0);
}
