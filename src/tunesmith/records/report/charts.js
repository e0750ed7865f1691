"use strict";
// Charts on canvases, and the few helpers that all pages share. Text enters the page through textContent only.

const COLOURS = ["#3b78e7", "#dd6b2f", "#2f9e63", "#a055c9", "#c94064", "#94811f", "#1f9caa", "#7d8590"];

// An element: `props` are its properties, `on…` its listeners, `class`, `data-…` and `aria-…` its attributes.
function make(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (/^(class|role|data-|aria-)/.test(name)) element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children.filter((child) => child !== null && child !== undefined).map((child) =>
    child instanceof Node ? child : printable(String(child))));
  return element;
}

// Control characters, marks that change the direction of text, and lone surrogates as their escapes.
function printable(text) {
  return text.replace(/[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g,
    (mark) => (mark < "\u0100" ? "\\x" + mark.charCodeAt(0).toString(16).padStart(2, "0")
      : "\\u" + mark.charCodeAt(0).toString(16).padStart(4, "0")));
}

function shown(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value) && Math.abs(value) < 1e6) return String(value);
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-3) return value.toExponential(2);
  return String(Number(value.toPrecision(4)));
}

function bytes(value) {
  for (const [unit, size] of [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["KB", 1e3]]) {
    if (Math.abs(value) >= size) return `${Number((value / size).toPrecision(3))} ${unit}`;
  }
  return `${value} B`;
}

function duration(seconds) {
  if (seconds >= 5400) return `${(seconds / 3600).toFixed(1)} h`;
  if (seconds >= 90) return `${(seconds / 60).toFixed(1)} min`;
  return `${Number(seconds.toPrecision(3))} s`;
}

function withUnit(value, unit) {
  if (value === null || value === undefined) return "–";
  if (unit === "bytes") return bytes(value);
  if (unit === "share") return `${Number((value * 100).toPrecision(3))}%`;
  return shown(value) + (unit ? ` ${unit}` : "");
}

// The exponential moving mean, without the bias of its start; what is null stays null.
function smoothed(values, weight) {
  let mean = 0, seen = 0;
  return values.map((value) => {
    if (value === null) return null;
    mean = weight * mean + (1 - weight) * value;
    seen = weight * seen + (1 - weight);
    return mean / seen;
  });
}

// Round numbers between two bounds, about `count` of them.
function ticks(low, high, count) {
  const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].find((factor) => factor * power >= raw) * power;
  const found = [];
  for (let n = Math.ceil(low / step); n * step <= high + step * 1e-9; n++) found.push(n * step);
  return found;
}

function colourOf(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// A canvas that is drawn when it gets or changes its size, also outside of the view: prints and pictures have all of the page.
// `draw(context, width, height)`.
function canvas(draw, label) {
  const element = make("canvas", { role: "img", "aria-label": label });
  const paint = () => {
    const width = element.clientWidth, height = element.clientHeight, ratio = window.devicePixelRatio || 1;
    if (!width) return;
    element.width = width * ratio;
    element.height = height * ratio;
    const context = element.getContext("2d");
    context.scale(ratio, ratio);
    context.font = "11px system-ui, sans-serif";
    draw(context, width, height);
  };
  new ResizeObserver(paint).observe(element);
  element.paint = paint;
  return element;
}

const LEFT = 52, BOTTOM = 18, TOP = 6, RIGHT = 8;

// The axes of a chart: returns functions from values to places.
function axes(context, width, height, x, y, log) {
  // Smoothing moves a constant by rounding: bounds as close as that count as equal.
  const grow = (low, high) => {
    const size = Math.max(Math.abs(low), Math.abs(high)) || 1;
    return high - low > size * 1e-9 ? [low, high] : [low - size / 2, high + size / 2];
  };
  const scaled = (value) => (log ? Math.log10(value) : value);
  const [left, right] = grow(...x), [bottom, top] = grow(...y.map(scaled));
  const atX = (value) => LEFT + ((value - left) / (right - left)) * (width - LEFT - RIGHT);
  const atY = (value) => height - BOTTOM - ((scaled(value) - bottom) / (top - bottom)) * (height - BOTTOM - TOP);
  context.strokeStyle = colourOf("--line");
  context.fillStyle = colourOf("--faint");
  context.lineWidth = 1;
  context.textAlign = "right";
  context.textBaseline = "middle";
  for (const tick of ticks(bottom, top, 4)) {
    const value = log ? 10 ** tick : tick, place = Math.round(atY(value)) + 0.5;
    context.beginPath();
    context.moveTo(LEFT, place);
    context.lineTo(width - RIGHT, place);
    context.stroke();
    context.fillText(shown(Number(value.toPrecision(6))), LEFT - 5, place);
  }
  context.textAlign = "center";
  context.textBaseline = "alphabetic";
  for (const tick of ticks(left, right, Math.max(2, width / 90))) context.fillText(shown(Number(tick.toPrecision(6))), atX(tick), height - 4);
  return { atX, atY };
}

// A line for each series {name, colour, x, mean, low, high}, with a band from low to high where there is one.
function lineChart(title, series, { unit = "", meaning = "", weight = 0, log = false, xName = "step" } = {}) {
  const known = series.map((one) => {
    const keep = one.x.map((x, i) => i).filter((i) => one.mean[i] !== null && one.x[i] !== null);
    const pick = (values) => values && keep.map((i) => values[i]);
    const mean = pick(one.mean);
    return { ...one, x: pick(one.x), mean, low: pick(one.low), high: pick(one.high), line: smoothed(mean, weight) };
  }).filter((one) => one.mean.length);
  const everyX = known.flatMap((one) => [Math.min(...one.x), Math.max(...one.x)]);
  const everyY = known.flatMap((one) => [...(weight && !one.low ? one.line : one.mean), ...(one.low || []), ...(one.high || [])]).filter((v) => v !== null && (!log || v > 0));
  const x = [Math.min(...everyX), Math.max(...everyX)];
  const y = [everyY.reduce((a, b) => Math.min(a, b), Infinity), everyY.reduce((a, b) => Math.max(a, b), -Infinity)];
  const values = known.map((one) => withUnit(one.line[one.line.length - 1], unit));
  const last = known.map((one, n) => `${known.length > 1 ? one.name + " " : ""}${values[n]}`).join("; ");
  const caption = make("figcaption", {});
  const rest = () => caption.replaceChildren(...(known.length > 1
    ? known.flatMap((one, n) => [swatch(one.colour), ` ${printable(one.name)} ${values[n]}  `]) : [last]));
  rest();
  let pointer = null;
  const element = canvas((context, width, height) => {
    if (!known.length || !everyY.length) return;
    const { atX, atY } = axes(context, width, height, x, y, log);
    const draws = (value) => value !== null && (!log || value > 0);
    for (const one of known) {
      context.strokeStyle = context.fillStyle = one.colour;
      if (one.low) {
        const inside = one.x.map((_, i) => i).filter((i) => draws(one.low[i]) && draws(one.high[i]));
        context.globalAlpha = 0.16;
        context.beginPath();
        for (const i of inside) context.lineTo(atX(one.x[i]), atY(one.high[i]));
        for (const i of inside.reverse()) context.lineTo(atX(one.x[i]), atY(one.low[i]));
        context.fill();
      }
      const trace = (values, alpha, thick) => {
        context.globalAlpha = alpha;
        context.lineWidth = thick;
        context.beginPath();
        values.forEach((value, i) => draws(value) && context.lineTo(atX(one.x[i]), atY(value)));
        context.stroke();
        if (values.length === 1 && draws(values[0])) context.fillRect(atX(one.x[0]) - 2, atY(values[0]) - 2, 4, 4);
      };
      if (weight) trace(one.mean, 0.25, 1);
      trace(one.line, 1, 1.6);
    }
    context.globalAlpha = 1;
    if (pointer !== null) {
      context.strokeStyle = colourOf("--faint");
      context.beginPath();
      context.moveTo(pointer, TOP);
      context.lineTo(pointer, height - BOTTOM);
      context.stroke();
    }
  }, `${title}: ${last}`);
  element.addEventListener("pointermove", (event) => {
    pointer = event.offsetX;
    const share = (pointer - LEFT) / (element.clientWidth - LEFT - RIGHT), at = x[0] + share * (x[1] - x[0]);
    caption.textContent = known.map((one) => {
      const i = nearest(one.x, at);
      return `${printable(one.name)}, ${xName} ${shown(one.x[i])}: ${withUnit(one.mean[i], unit)}`;
    }).join("; ");
    element.paint();
  });
  element.addEventListener("pointerleave", () => { pointer = null; rest(); element.paint(); });
  return make("figure", { "data-metric": title }, make("h3", { title: meaning }, title), element, caption);
}

// The index of the number nearest to `value` in an increasing list.
function nearest(values, value) {
  let low = 0, high = values.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (values[middle] < value) low = middle; else high = middle;
  }
  return Math.abs(values[low] - value) <= Math.abs(values[high] - value) ? low : high;
}

// Layers {name, colour, values} over each other.
function stackedChart(title, x, layers) {
  const sums = x.map((_, i) => layers.reduce((sum, layer) => sum + (layer.values[i] || 0), 0));
  const caption = make("figcaption", {});
  const rest = () => caption.replaceChildren(...layers.flatMap((layer) => [swatch(layer.colour), ` ${printable(layer.name)}  `]));
  const element = canvas((context, width, height) => {
    const { atX, atY } = axes(context, width, height, [x[0], x[x.length - 1]], [0, sums.reduce((a, b) => Math.max(a, b), 0)], false);
    let below = x.map(() => 0);
    for (const layer of layers) {
      const above = below.map((sum, i) => sum + (layer.values[i] || 0));
      context.fillStyle = layer.colour;
      context.beginPath();
      if (x.length === 1) context.rect(LEFT, atY(above[0]), width - LEFT - RIGHT, atY(below[0]) - atY(above[0]));
      x.forEach((value, i) => context.lineTo(atX(value), atY(above[i])));
      for (let i = x.length - 1; i >= 0; i--) context.lineTo(atX(x[i]), atY(below[i]));
      context.fill();
      below = above;
    }
  }, title);
  element.addEventListener("pointermove", (event) => {
    const share = (event.offsetX - LEFT) / (element.clientWidth - LEFT - RIGHT);
    const i = nearest(x, x[0] + share * (x[x.length - 1] - x[0]));
    const parts = layers.filter((layer) => layer.values[i]).map((layer) => `${layer.name} ${duration(layer.values[i])}`);
    caption.textContent = printable(`step ${x[i]}: ${duration(sums[i])}: ${parts.join(", ")}`);
  });
  element.addEventListener("pointerleave", rest);
  rest();
  return make("figure", { class: "wide" }, make("h3", {}, title), element, caption);
}

// The rows of a step's trace; spans are coloured by their names, and waits are pale.
function timelineChart(trace) {
  const ROW = 15, stop = trace.rows.reduce((most, row) => row.spans.reduce((m, s) => Math.max(m, s[1] + s[2]), most), 0) || 1;
  const kinds = [...new Set(trace.rows.flatMap((row) => row.spans.map((span) => span[0])))];
  const colour = (name) => COLOURS[kinds.indexOf(name) % COLOURS.length];
  const caption = make("figcaption", {}, `${duration(stop)}; point at a span for its name`);
  const left = 90, at = (second, width) => left + (second / stop) * (width - left - RIGHT);
  const element = canvas((context, width) => {
    context.fillStyle = colourOf("--faint");
    context.textBaseline = "middle";
    trace.rows.forEach((row, n) => {
      const first = n === 0 || trace.rows[n - 1].lane !== row.lane;
      context.globalAlpha = 1;
      context.fillStyle = colourOf("--faint");
      if (first) context.fillText(printable(row.lane), 2, n * ROW + ROW / 2);
      for (const [name, start, seconds, waits] of row.spans) {
        context.globalAlpha = waits ? 0.25 : 0.9;
        context.fillStyle = colour(name);
        context.fillRect(at(start, width), n * ROW + 2, Math.max(1, (seconds / stop) * (width - left - RIGHT)), ROW - 3);
      }
    });
  }, `timeline of step ${trace.step}`);
  element.style.height = `${Math.max(1, trace.rows.length) * ROW}px`;
  element.addEventListener("pointermove", (event) => {
    const row = trace.rows[Math.floor(event.offsetY / ROW)];
    const second = ((event.offsetX - left) / (element.clientWidth - left - RIGHT)) * stop;
    const span = row && row.spans.find((one) => one[1] <= second && second <= one[1] + one[2]);
    caption.textContent = span ? printable(`${row.lane}: ${span[0]}, ${duration(span[2])}${span[3] ? `, waits for ${span[3]}` : ""}`) : "";
  });
  return make("figure", { class: "wide" }, make("h3", {}, `Step ${trace.step}${trace.metrics ? ", from its metrics" : ""}`), element, caption);
}

function swatch(colour) {
  const element = make("span", { class: "swatch" });
  element.style.backgroundColor = colour;
  return element;
}
