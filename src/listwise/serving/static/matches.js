// The matched points of two photos: both photos, and a line for each match.

import { draw } from "./dom.js";
import { setPicture } from "./pictures.js";

const SIDE = 1000; // of the drawing, in its own units
const GAP = 24;

/** Both photos with one height, side by side, or with one width, one above the other. */
function arranged(photos, stacked) {
  const [first, second] = photos.map((photo) => {
    const scale = SIDE / (stacked ? photo.width : photo.height);
    return { ...photo, scale, w: photo.width * scale, h: photo.height * scale };
  });
  const shift = stacked ? [0, first.h + GAP] : [first.w + GAP, 0];
  const width = stacked ? SIDE : shift[0] + second.w;
  const height = stacked ? shift[1] + second.h : SIDE;
  return { first, second, shift, width, height, stacked };
}

/** Area that the photos fill in the available space. */
function filled({ first, second, width, height }, room) {
  const zoom = Math.min(room.width / width, room.height / height);
  return (first.w * first.h + second.w * second.h) * zoom ** 2;
}

/**
 * Draw both photos as large as possible, side by side or one above the other.
 * @param {{url: string, width: number, height: number}} query size in pixels of the upright photo, as the points
 * @param {{url: string, width: number, height: number}} result
 * @param {number[][]} matches [query x, query y, result x, result y]
 * @param {{width: number, height: number}} room available space on the screen
 */
export function drawMatches(query, result, matches, room) {
  const [beside, below] = [false, true].map((way) => arranged([query, result], way));
  const best = filled(below, room) > filled(beside, room) ? below : beside;
  const { first, second, shift, width, height, stacked } = best;

  const picture = ({ url, w, h }, x, y) => {
    const image = draw("image", { x, y, width: w, height: h, preserveAspectRatio: "none" });
    setPicture(image, url);
    return image;
  };
  const drawing = draw(
    "svg",
    { class: "matches", viewBox: `0 0 ${width} ${height}`, role: "img" },
    picture(first, 0, 0),
    picture(second, ...shift),
  );
  drawing.style.aspectRatio = `${width} / ${height}`;

  // Neighboring points of the query get similar colors.
  const order = stacked ? 0 : 1;
  const sorted = [...matches].sort((a, b) => a[order] - b[order]);
  const lines = draw("g", { class: "lines" });
  const dots = draw("g", { class: "dots" });
  sorted.forEach(([qx, qy, x, y], number) => {
    const hue = 20 + (300 * number) / Math.max(1, sorted.length - 1);
    const stroke = `hsl(${hue} 95% 62%)`;
    const a = [qx * first.scale, qy * first.scale];
    const b = [x * second.scale + shift[0], y * second.scale + shift[1]];
    lines.append(draw("path", { d: `M${a}L${b}`, stroke }));
    // A line of length 0 with a round end is a dot whose size does not depend on the zoom.
    for (const end of [a, b]) dots.append(draw("path", { d: `M${end}h0`, stroke }));
  });
  drawing.append(lines, dots);
  return drawing;
}
