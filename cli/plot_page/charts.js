'use strict';
// Draws the runs that the page carries. A run is cut into buckets of steps (one step each, unless
// there are very many); a series has a mean per bucket, and its extremes where buckets are larger.

const data = JSON.parse(document.getElementById('data').textContent);
const runs = data.runs;
const NUM_COLOURS = 8;
const DASHES = ['', '7 3', '2 3', '9 3 2 3', '1 4', '12 4'];
const HEIGHT = 230, TOP = 10, BOTTOM = 26, LEFT = 58, RIGHT = 12;

// ---- numbers as text ----

function trimmed(value, digits) {
  return String(Number(value.toPrecision(digits)));
}
function plain(value) {
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) {
    return value.toExponential(3).replace(/\.?0+e/, 'e').replace('e+', 'e');
  }
  return trimmed(value, 5);
}
function scaled(value, base, units, digits) {
  let unit = 0;
  while (Math.abs(value) >= base && unit + 1 < units.length) {
    value /= base;
    ++unit;
  }
  return trimmed(value, digits) + units[unit];
}
const FORMATS = {
  plain: plain,
  count: value => scaled(value, 1000, ['', 'k', 'M', 'G', 'T'], 4),
  bytes: value => scaled(value, 1024, [' B', ' KiB', ' MiB', ' GiB', ' TiB'], 4),
  percent: value => trimmed(100 * value, 3) + ' %',
  seconds: value => {
    const size = Math.abs(value);
    if (size === 0) return '0';
    if (size < 1e-3) return trimmed(value * 1e6, 3) + ' us';
    if (size < 1) return trimmed(value * 1e3, 3) + ' ms';
    if (size < 120) return trimmed(value, 3) + ' s';
    if (size < 7200) return trimmed(value / 60, 3) + ' min';
    return trimmed(value / 3600, 4) + ' h';
  },
};
const AXES = {
  step: {title: 'step', format: 'count'},
  tokens: {title: 'tokens', format: 'count'},
  time: {title: 'training time', format: 'seconds'},
};

// ---- the charts there can be; those without a number are left out ----

const CHARTS = [
  {title: 'Loss', format: 'plain', smooth: true, scales: true, marks: true,
   parts: [['loss', 'training'], ['eval_loss', 'validation']]},
  {title: 'Gradient norm', format: 'plain', smooth: true, scales: true, marks: true,
   parts: [['grad_norm', 'norm before clipping']]},
  {title: 'Learning rate', format: 'plain', zero: true, parts: [['lr', 'learning rate']]},
  {title: 'Speed, tokens per second', format: 'count', zero: true, smooth: true,
   parts: [['tokens_per_s', 'tokens/s']]},
  {title: 'MFU, share of the peak', format: 'percent', zero: true, smooth: true,
   parts: [['mfu', 'MFU']]},
  {title: 'Time of a step', format: 'seconds', zero: true, smooth: true, robust: true,
   parts: [['forward_s', 'forward'], ['backward_s', 'backward'], ['update_s', 'update'],
           ['step_s', 'whole step']]},
  {title: 'Exposed wait per step', format: 'seconds', zero: true, smooth: true, robust: true,
   parts: [['exposed_wait_s', 'waits for gathers, reductions and the norm']]},
  {title: 'Memory held per tier', format: 'bytes', zero: true,
   parts: [['held_device_bytes', 'device'], ['held_pinned_bytes', 'pinned host'],
           ['held_host_bytes', 'host'], ['held_nvme_bytes', 'NVMe']]},
  {title: 'Memory of the process, peak so far', format: 'bytes', zero: true,
   parts: [['rss_peak_bytes', 'resident in host memory'], ['device_peak_bytes', 'on the device']]},
  {title: 'Loss scale', format: 'count', zero: true, changes: true,
   parts: [['loss_scale', 'loss scale']]},
];

const state = {axis: 'step', log: false, smoothing: 0, hidden: new Set(), hover: null};

// ---- small helpers ----

function element(name, attributes, parent, text) {
  const node = document.createElement(name);
  for (const key in attributes || {}) node.setAttribute(key, attributes[key]);
  if (text !== undefined) node.textContent = text;
  if (parent) parent.append(node);
  return node;
}
function shape(name, attributes, parent, text) {
  const node = document.createElementNS('http://www.w3.org/2000/svg', name);
  for (const key in attributes) node.setAttribute(key, attributes[key]);
  if (text !== undefined) node.textContent = text;
  if (parent) parent.append(node);
  return node;
}
const colour = index => `var(--c${index % NUM_COLOURS})`;
function has(run, field) {
  const series = run.series[field];
  return series !== undefined && (series.nulls !== undefined || series.mean.some(value => value !== null));
}
// One run: a colour per part. Several: a colour per run, and a dash per part.
function style(run, part) {
  if (runs.length === 1) return {stroke: colour(part), dash: ''};
  const round = Math.floor(run / NUM_COLOURS);
  return {stroke: colour(run), dash: DASHES[(part + round) % DASHES.length]};
}
function sample(parent, look) {
  const svg = shape('svg', {viewBox: '0 0 20 8', 'aria-hidden': 'true'}, parent);
  shape('line', {x1: 0, x2: 20, y1: 4, y2: 4, stroke: look.stroke, 'stroke-width': 2.5,
                 'stroke-dasharray': look.dash}, svg);
}

// An exponential mean that starts at the first value; what is not a number is passed over.
function smoothed(values, weight) {
  if (weight === 0) return values;
  let mean = 0, total = 0;
  return values.map(value => {
    if (value === null) return null;
    mean = weight * mean + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return mean / total;
  });
}

// ---- scales ----

function niceTicks(low, high, count, base) {
  const rough = (high - low) / count;
  const power = Math.pow(10, Math.floor(Math.log10(rough / base)));
  const step = [1, 2, 2.5, 5, 10].map(f => f * power * base).find(s => s >= rough * 0.999);
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; ++i) ticks.push(i * step);
  return ticks;
}
function logTicks(low, high) {
  for (const factors of [[1], [1, 3], [1, 2, 5], [1, 1.5, 2, 3, 5, 7]]) {
    const ticks = [];
    for (let p = Math.floor(Math.log10(low)); p <= Math.ceil(Math.log10(high)); ++p) {
      for (const factor of factors) {
        const tick = factor * Math.pow(10, p);
        if (tick >= low * 0.9999 && tick <= high * 1.0001) ticks.push(tick);
      }
    }
    if (ticks.length >= 3) return ticks.length > 9 ? ticks.filter((_, i) => i % 2 === 0) : ticks;
  }
  return niceTicks(low, high, 4, 1);
}
// Of a unit in which ticks are round: MiB, milliseconds or minutes.
function unitOf(format, high) {
  if (format === 'bytes') return Math.pow(1024, Math.max(0, Math.floor(Math.log2(high) / 10)));
  if (format === 'seconds' && high >= 7200) return 3600;
  if (format === 'seconds' && high >= 120) return 60;
  return 1;
}

// ---- one chart ----

class Chart {
  constructor(spec, parent) {
    this.spec = spec;
    this.parts = spec.parts.map((part, index) => ({field: part[0], title: part[1], index}))
        .filter(part => runs.some(run => has(run, part.field) && this.worth(run, part.field)));
    if (this.parts.length === 0) return;
    this.card = element('section', {class: 'card'}, parent);
    const head = element('div', {class: 'head'}, this.card);
    element('h2', {}, head, spec.title);
    if (this.parts.length > 1) {
      const list = element('div', {class: 'parts'}, head);
      for (const part of this.parts) {
        const item = element('span', {}, list);
        sample(item, runs.length === 1 ? style(0, part.index)
                                       : {stroke: 'currentColor', dash: DASHES[part.index]});
        item.append(part.title);
      }
    }
    this.note = element('p', {class: 'note'}, this.card);
    this.svg = shape('svg', {role: 'img', 'aria-label': spec.title}, this.card);
    this.tip = element('div', {class: 'tip', hidden: ''}, this.card);
    this.svg.addEventListener('pointermove', event => this.point(event));
    this.svg.addEventListener('pointerdown', event => this.point(event));
    this.svg.addEventListener('pointerleave', () => hover(null));
  }

  // Zeros alone (a tier that is not used) and a loss scale that never changes say nothing.
  worth(run, field) {
    const values = run.series[field].mean.filter(value => value !== null);
    if (this.spec.changes) return values.some(value => value !== values[0]);
    return this.spec.format !== 'bytes' || values.some(value => value !== 0);
  }

  get log() { return this.spec.scales && state.log; }

  lines() {
    const found = [];
    runs.forEach((run, index) => {
      if (state.hidden.has(index)) return;
      for (const part of this.parts) {
        const series = run.series[part.field];
        if (!has(run, part.field)) continue;
        const weight = this.spec.smooth ? state.smoothing : 0;
        found.push({run, index, part, x: run.x[state.axis], raw: series.mean, min: series.min,
                    max: series.max, nulls: series.nulls || [], shown: smoothed(series.mean, weight),
                    is_smoothed: weight > 0, look: style(index, part.index)});
      }
    });
    return found;
  }

  draw() {
    if (!this.card) return;
    const width = Math.max(this.svg.clientWidth, 120);
    this.svg.setAttribute('viewBox', `0 0 ${width} ${HEIGHT}`);
    this.svg.replaceChildren();
    this.series = this.lines();
    this.note.textContent = '';
    if (this.series.length === 0) {
      this.map = null;
      shape('text', {x: width / 2, y: HEIGHT / 2, 'text-anchor': 'middle'}, this.svg, 'no run is shown');
      return;
    }
    this.map = this.scales(width);
    this.drawAxes(width);
    const clip = `clip${CHARTS.indexOf(this.spec)}`;
    const box = shape('clipPath', {id: clip}, this.svg);
    shape('rect', {x: LEFT, y: TOP - 2, width: width - LEFT - RIGHT, height: HEIGHT - TOP - BOTTOM + 4}, box);
    const area = shape('g', {'clip-path': `url(#${clip})`}, this.svg);
    for (const line of this.series) this.drawLine(line, area);
    if (this.spec.marks) for (const line of this.series) this.drawMarks(line);
    this.cross = shape('line', {class: 'cross', y1: TOP, y2: HEIGHT - BOTTOM, visibility: 'hidden'}, this.svg);
    this.dots = shape('g', {'pointer-events': 'none'}, this.svg);
  }

  scales(width) {
    let x0 = Infinity, x1 = -Infinity, low = Infinity, high = -Infinity;
    const all = [];
    for (const line of this.series) {
      x0 = Math.min(x0, line.x[0]);
      x1 = Math.max(x1, line.x[line.x.length - 1]);
      line.raw.forEach((value, i) => {
        const bounds = line.is_smoothed ? [value, line.shown[i]]
                                        : [line.min ? line.min[i] : value, line.max ? line.max[i] : value];
        for (const bound of bounds) {
          if (bound === null || (this.log && bound <= 0)) continue;
          low = Math.min(low, bound);
          high = Math.max(high, bound);
          all.push(bound);
        }
      });
    }
    if (x0 === x1) { x0 -= 0.5; x1 += 0.5; }
    if (state.axis !== 'step') x0 = Math.min(x0, 0);
    if (low > high) { low = this.log ? 1 : 0; high = this.log ? 10 : 1; }
    if (this.spec.robust && all.length >= 10) {
      // The first step is often many times slower than all others: it would flatten them.
      all.sort((a, b) => a - b);
      const usual = all[Math.floor(0.97 * (all.length - 1))];
      if (usual > 0 && high > 2.5 * usual) {
        this.note.textContent = `up to ${FORMATS[this.spec.format](high)}, beyond this axis`;
        high = 1.3 * usual;
      }
    }
    if (this.log) {
      if (high / low < 1.05) { low /= 1.1; high *= 1.1; }
      const padding = Math.pow(high / low, 0.04);
      low /= padding;
      high *= padding;
    } else {
      if (this.spec.zero) low = Math.min(low, 0);
      if (low === high) { const pad = Math.abs(low) * 0.1 || 1; high += pad; if (!this.spec.zero) low -= pad; }
      const padding = 0.05 * (high - low);
      high += padding;
      if (low !== 0) low -= padding;
    }
    const plotWidth = width - LEFT - RIGHT, plotHeight = HEIGHT - TOP - BOTTOM;
    const place = this.log ? v => (Math.log(v) - Math.log(low)) / (Math.log(high) - Math.log(low))
                           : v => (v - low) / (high - low);
    return {
      x0, x1, low, high,
      x: v => LEFT + plotWidth * (v - x0) / (x1 - x0),
      y: v => this.log && v <= 0 ? HEIGHT - BOTTOM : TOP + plotHeight * (1 - place(v)),
      back: px => x0 + (x1 - x0) * (px - LEFT) / plotWidth,
    };
  }

  drawAxes(width) {
    const {map, spec} = this, axis = AXES[state.axis];
    const format = FORMATS[spec.format];
    const ys = this.log ? logTicks(map.low, map.high)
                        : niceTicks(map.low, map.high, 5, unitOf(spec.format, map.high));
    for (const tick of ys) {
      const y = map.y(tick);
      shape('line', {class: 'grid', x1: LEFT, x2: width - RIGHT, y1: y, y2: y}, this.svg);
      shape('text', {x: LEFT - 7, y: y + 4, 'text-anchor': 'end'}, this.svg, format(tick));
    }
    const bottom = HEIGHT - BOTTOM;
    shape('line', {class: 'axis', x1: LEFT, x2: width - RIGHT, y1: bottom, y2: bottom}, this.svg);
    const wanted = Math.max(2, Math.floor((width - LEFT) / 85));
    let xs = niceTicks(map.x0, map.x1, wanted, unitOf(axis.format, map.x1));
    if (state.axis === 'step') xs = xs.filter(Number.isInteger);
    const title = shape('text', {x: width - RIGHT, y: HEIGHT - 8, 'text-anchor': 'end'}, this.svg, axis.title);
    const titleBegin = width - RIGHT - title.getComputedTextLength() - 30;
    for (const tick of xs) {
      const x = map.x(tick);
      shape('line', {class: 'axis', x1: x, x2: x, y1: bottom, y2: bottom + 4}, this.svg);
      if (x < titleBegin) {
        shape('text', {x, y: HEIGHT - 8, 'text-anchor': 'middle'}, this.svg, FORMATS[axis.format](tick));
      }
    }
  }

  path(xs, ys) {
    let text = '', pen = 'M';
    for (let i = 0; i < ys.length; ++i) {
      if (ys[i] === null) { pen = 'M'; continue; }
      text += `${pen}${this.map.x(xs[i]).toFixed(1)} ${this.map.y(ys[i]).toFixed(1)}`;
      pen = 'L';
    }
    return text;
  }

  drawLine(line, area) {
    const {stroke, dash} = line.look;
    if (line.min && !line.is_smoothed) {
      // The band between the extremes of each bucket, piece by piece between gaps.
      let from = 0;
      for (let i = 0; i <= line.raw.length; ++i) {
        if (i < line.raw.length && line.raw[i] !== null) continue;
        if (i - from > 1) {
          const up = this.path(line.x.slice(from, i), line.max.slice(from, i));
          const down = this.path(line.x.slice(from, i).reverse(), line.min.slice(from, i).reverse());
          shape('path', {d: up + down.replace('M', 'L') + 'Z', fill: stroke, 'fill-opacity': 0.22}, area);
        }
        from = i + 1;
      }
    }
    const common = {fill: 'none', stroke, 'stroke-linejoin': 'round', 'stroke-linecap': dash ? 'butt' : 'round'};
    if (line.is_smoothed) {
      shape('path', {...common, d: this.path(line.x, line.raw), 'stroke-width': 1, 'stroke-opacity': 0.28}, area);
    }
    // Many points side by side would run into one another.
    const crowded = this.spec.smooth && !line.is_smoothed && line.x.length > this.svg.clientWidth;
    const width = crowded ? 1.1 : 1.8;
    shape('path', {...common, d: this.path(line.x, line.shown), 'stroke-width': width, 'stroke-dasharray': dash}, area);
    // A value between two gaps has no line.
    line.shown.forEach((value, i) => {
      const alone = value !== null && (i === 0 || line.shown[i - 1] === null) &&
          (i + 1 === line.shown.length || line.shown[i + 1] === null);
      if (alone) shape('circle', {cx: this.map.x(line.x[i]), cy: this.map.y(value), r: 3, fill: stroke}, area);
    });
  }

  // Triangles on the axis: skipped steps. Crosses at the top: numbers that are not finite.
  drawMarks(line) {
    if (line.part.index !== 0) return;
    const bottom = HEIGHT - BOTTOM;
    for (const i of line.run.skipped) {
      const x = this.map.x(line.x[i]);
      shape('path', {d: `M${x} ${bottom - 8}l4.5 8h-9z`, fill: line.look.stroke}, this.svg);
    }
    for (const i of line.nulls) {
      const x = this.map.x(line.x[i]);
      shape('path', {d: `M${x - 3} ${TOP - 3}l6 6m0 -6l-6 6`, stroke: line.look.stroke, 'stroke-width': 1.6}, this.svg);
    }
    const notes = [];
    if (this.series.some(l => l.run.skipped.length > 0)) notes.push('\u25b2 skipped');
    if (this.series.some(l => l.nulls.length > 0)) notes.push('\u00d7 not finite');
    this.note.textContent = notes.join('   ');
  }

  point(event) {
    if (!this.map) return;
    const box = this.svg.getBoundingClientRect();
    const px = Math.min(Math.max(event.clientX - box.left, LEFT), box.width - RIGHT);
    hover({x: this.map.back(px), chart: this});
  }

  showHover() {
    if (!this.card || !this.map) return;
    this.dots.replaceChildren();
    const at = state.hover;
    this.tip.hidden = !at || at.chart !== this;
    this.cross.setAttribute('visibility', at ? 'visible' : 'hidden');
    if (!at) return;
    const px = this.map.x(Math.min(Math.max(at.x, this.map.x0), this.map.x1));
    this.cross.setAttribute('x1', px);
    this.cross.setAttribute('x2', px);
    this.tip.replaceChildren();
    const format = FORMATS[this.spec.format], axis = AXES[state.axis];
    let titled = false;
    for (const line of this.series) {
      const slack = (this.map.x1 - this.map.x0) / 100;
      if (at.x < line.x[0] - slack || at.x > line.x[line.x.length - 1] + slack) continue;
      const i = nearest(line.x, at.x);
      const value = line.shown[i];
      if (value !== null && this.map.y(value) >= TOP - 2) {
        shape('circle', {cx: this.map.x(line.x[i]), cy: this.map.y(value), r: 3.2, fill: line.look.stroke}, this.dots);
      }
      if (this.tip.hidden) continue;
      if (!titled) {
        const exact = state.axis === 'step' ? String(line.x[i]) : FORMATS[axis.format](line.x[i]);
        element('b', {}, this.tip, `${axis.title} ${exact}`);
        titled = true;
      }
      const row = element('div', {}, this.tip);
      sample(row, line.look);
      const names = [];
      if (runs.length > 1) names.push(line.run.name);
      if (this.parts.length > 1 || runs.length === 1) names.push(line.part.title);
      element('span', {class: 'what'}, row, names.join(', '));
      let text = value === null ? (line.nulls.includes(i) ? 'not finite' : '-') : format(value);
      if (line.is_smoothed && line.raw[i] !== null) text += ` (${format(line.raw[i])})`;
      if (!line.is_smoothed && line.min && line.min[i] !== line.max[i] && value !== null) {
        text += ` (${format(line.min[i])} to ${format(line.max[i])})`;
      }
      if (this.spec.marks && line.part.index === 0 && line.run.skipped.includes(i)) text += ' skipped';
      element('span', {class: 'value'}, row, text);
    }
    this.tip.hidden = this.tip.hidden || !titled;
    if (!this.tip.hidden) {
      // Beside the line if there is room, else below the chart: never over what it explains.
      const card = this.card.getBoundingClientRect(), svg = this.svg.getBoundingClientRect();
      const at_px = svg.left - card.left + px, room = card.width - this.tip.offsetWidth - 8;
      const fits = at_px + 14 <= room || at_px - 14 - this.tip.offsetWidth >= 8;
      const left = at_px + 14 <= room ? at_px + 14 : fits ? at_px - 14 - this.tip.offsetWidth : at_px;
      this.tip.style.left = `${Math.max(Math.min(left, room), 8)}px`;
      this.tip.style.top = `${svg.top - card.top + (fits ? TOP : HEIGHT - BOTTOM + 6)}px`;
    }
  }
}

function nearest(xs, x) {
  let low = 0, high = xs.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) low = middle; else high = middle;
  }
  return Math.abs(xs[low] - x) <= Math.abs(xs[high] - x) ? low : high;
}

// ---- the page ----

const parent = document.getElementById('charts');
const charts = CHARTS.map(spec => new Chart(spec, parent)).filter(chart => chart.card);
if (runs.length === 1) document.querySelector('h1').textContent = 'Training run';
if (charts.length === 0) element('p', {class: 'empty'}, parent, 'No step has been recorded yet.');

function hover(at) {
  state.hover = at;
  charts.forEach(chart => chart.showHover());
}
let asked = 0;
function redraw() {
  cancelAnimationFrame(asked);
  asked = requestAnimationFrame(() => {
    state.hover = null;
    charts.forEach(chart => { chart.draw(); chart.tip.hidden = true; });
  });
}
runs.forEach((run, index) => {
  const button = element('button', {type: 'button', class: 'run', 'aria-pressed': 'true'},
                         document.getElementById('runs'));
  const swatch = element('span', {class: 'swatch'}, button);
  sample(swatch, style(index, 0));
  element('span', {class: 'name'}, button, run.name);
  element('span', {class: 'facts'}, button, run.facts);
  button.addEventListener('click', () => {
    if (!state.hidden.delete(index)) state.hidden.add(index);
    button.setAttribute('aria-pressed', String(!state.hidden.has(index)));
    redraw();
  });
});
document.getElementById('controls').addEventListener('input', event => {
  const {name, value, id} = event.target;
  if (name === 'axis') state.axis = value;
  if (name === 'scale') state.log = value === 'log';
  if (id === 'smoothing') {
    state.smoothing = Number(value);
    document.getElementById('smoothing-value').textContent = value;
  }
  redraw();
});
new ResizeObserver(redraw).observe(parent);
charts.forEach(chart => chart.draw());
