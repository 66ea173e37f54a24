'use strict';
(() => {
const $ = id => document.getElementById(id);
// Data only becomes text nodes and attributes: a run's name may hold markup.
const make = (create, tag, attributes, children) => {
  const node = create(tag);
  for (const [name, value] of Object.entries(attributes)) if (value !== null && value !== undefined) node.setAttribute(name, value);
  node.append(...children.filter(child => child !== null));
  return node;
};
const el = (tag, attributes = {}, ...children) => make(t => document.createElement(t), tag, attributes, children);
const svg = (tag, attributes = {}, ...children) =>
  make(t => document.createElementNS('http://www.w3.org/2000/svg', t), tag, attributes, children);

const view = JSON.parse($('data').textContent);
const shown = { hidden: new Set(), known: new Set(), open: new Set(), sort: null, down: false, x: 'step', smoothing: 0, log: { apart: true }, zoom: null, cursor: null };

// [column, title, unit, factor]
const METRICS = [
  ['loss', 'Loss', '', 1], ['apart', '', '', 1],
  ['reward_mean', 'Reward', '', 1], ['reward_margin', 'Reward margin', '', 1], ['reward_accuracy', 'Reward accuracy', '%', 100],
  ['accuracy', 'Accuracy', '%', 100], ['reward_chosen', 'Reward of chosen answers', '', 1], ['reward_rejected', 'Reward of rejected answers', '', 1],
  ['kl', 'KL to the reference', 'nats', 1], ['reverse_kl', 'KL to the teacher', 'nats', 1], ['entropy', 'Entropy', 'nats', 1], ['completion_tokens', 'Sampled tokens', 'per step', 1], ['tokens_per_sec', 'Throughput', 'tokens/s', 1],
  ['grad_norm', 'Gradient norm', '', 1], ['step_time_s', 'Step time', 'ms', 1e3],
  ['exposed_comm_s', 'Exposed communication', 'ms', 1e3], ['peak_mem_bytes', 'Peak memory per rank', 'MiB', 1 / (1 << 20)],
  ['lr', 'Learning rate', '', 1], ['mfu', 'MFU', '%', 100], ['sol', '% of peak', '%', 100], ['data_time_s', 'Waiting for data', 'ms', 1e3],
];
// On a page about models, these curves stand below the settings.
const COSTS = ['tokens_per_sec', 'step_time_s', 'exposed_comm_s', 'peak_mem_bytes', 'mfu', 'sol', 'data_time_s'];
const ACROSS = [['step', 'step'], ['tokens_so_far', 'tokens'], ['seconds_so_far', 'training time, s']];
const MEMORY = [['params', 1], ['grads', 4], ['optimizer', 7], ['slots', 3], ['saved', 2], ['scratch', 0], ['other', 5]];
const MIB = 1 << 20;

const color = i => `var(--c${i % 8})`;
const dashes = i => ['', '7 4', '2 3', '9 3 2 3'][Math.floor(i / 8) % 4];
const grouped = (x, digits = 0) => x.toLocaleString('en-US', { minimumFractionDigits: digits, maximumFractionDigits: digits });
const mib = bytes => grouped(bytes / MIB, bytes < 100 * MIB ? 1 : 0);
const number = x => {
  const a = Math.abs(x);
  if (a === 0) return '0';
  if (a >= 1e7 || a < 1e-3) return x.toExponential(2).replace(/\.?0+e/, 'e').replace('e+', 'e');
  return a >= 1000 ? grouped(x) : String(+x.toPrecision(5));
};
// Texts of an axis: as many digits as tell them apart.
const labels = list => {
  for (let digits = 0; digits < 9; digits++) {
    const texts = list.map(x => digits ? grouped(x, digits) : number(x));
    if (new Set(texts).size === texts.length) return texts;
  }
  return list.map(String);
};
const swatch = i => el('span', { class: 'swatch', style: `border-color:${color(i)};border-style:${dashes(i) ? 'dashed' : 'solid'}` });
const column = (run, name) => (run.columns && run.columns[name]) || null;
const baseline = () => view.runs.find(run => run.baseline) || view.runs[0];

// ---- Cards and table

function cards() {
  document.querySelector('h1').textContent = document.title = view.title;
  $('lead').textContent = view.lead;
  $('note').textContent = view.note;
  $('cards').replaceChildren(...view.cards.map(([value, meaning]) => el('div', { class: 'card' }, el('b', {}, value), el('span', {}, meaning))));
}

function heads() {
  if (shown.head === String(view.head)) return;
  shown.head = String(view.head);
  const head = el('tr');
  $('sort').replaceChildren();
  view.head.forEach((text, i) => {
    const button = el('button', { type: 'button' }, text);
    button.onclick = () => sortBy(i, shown.sort === i && !shown.down);
    head.append(el('th', { scope: 'col' }, button));
    $('sort').append(el('option', { value: i }, text));
  });
  $('sort').prepend(el('option', { value: '' }, 'order of the runs'));
  $('sort').value = '';
  $('sort').onchange = () => sortBy($('sort').value === '' ? null : +$('sort').value, false);
  $('runs').tHead.replaceChildren(head);
  shown.sort = null;
}

function sortBy(column, down) {
  Object.assign(shown, { sort: column, down });
  [...$('runs').tHead.rows[0].cells].forEach((th, i) => {
    if (i === column) th.setAttribute('aria-sort', down ? 'descending' : 'ascending');
    else th.removeAttribute('aria-sort');
  });
  $('sort').value = column === null ? '' : column;
  rows();
}

function rows() {
  const order = view.runs.map((run, i) => [run, i]);
  if (shown.sort !== null) {
    const key = run => (run.keys ? run.keys[shown.sort] : null);
    order.sort(([a], [b]) => {
      const [x, y] = [key(a), key(b)];
      if (x === null || y === null) return (x === null) - (y === null); // unknown values come last either way
      return (typeof x === 'string' ? x.localeCompare(y, 'en', { numeric: true }) : x - y) * (shown.down ? -1 : 1);
    });
  }
  $('runs').tBodies[0].replaceChildren(...order.map(([run, i]) => {
    const badge = run.badge ? el('span', { class: `badge ${run.status}` }, run.badge) : null;
    const row = el('tr', { class: run.baseline ? 'baseline' : run.status }, el('td', {}, swatch(i), run.name, badge));
    if (run.cells) run.cells.slice(1).forEach((cell, n) => row.append(el('td', { 'data-head': view.head[n + 1] }, cell)));
    if (!run.cells) row.append(el('td', { class: 'message', colspan: view.head.length - 1 }, run.message));
    return row;
  }));
}

// ---- Curves

const charts = new Map();

// Points [x, y, step] of a run; y is null where it is missing.
function points(run, metric, factor) {
  const xs = column(run, shown.x), steps = column(run, 'step');
  let ys = column(run, metric);
  if (metric === 'apart') {
    const base = baseline(), losses = column(base, 'loss');
    if (view.about_models || run === base || !losses || !column(run, 'loss') || String(run.losses_of) !== String(base.losses_of)) return [];
    const at = new Map(base.columns.step.map((step, i) => [step, losses[i]]));
    ys = column(run, 'loss').map((loss, i) => {
      const other = at.get(steps[i]);
      return loss === null || other === null || other === undefined || other === 0 ? null : Math.abs(loss - other) / Math.abs(other);
    });
  }
  if (!xs || !ys) return [];
  return xs.map((x, i) => [x, ys[i] === null ? null : ys[i] * factor, steps[i]]).filter(point => point[0] !== null);
}

// A debiased exponential moving average, as in TensorBoard.
function smooth(list, weight) {
  let sum = 0, total = 0;
  return list.map(([x, y, step]) => {
    if (y === null) return [x, y, step];
    sum = sum * weight + y * (1 - weight);
    total = total * weight + 1 - weight;
    return [x, sum / total, step];
  });
}

function ticks(low, high, count, log) {
  if (log) {
    const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high)), found = [];
    const every = Math.ceil((last - first) / 6) || 1, within = last - first <= 2 ? [1, 2, 5] : [1];
    for (let e = first; e <= last; e += every) for (const m of within) found.push(m * 10 ** e);
    return found.filter(x => x >= low * 0.999 && x <= high * 1.001);
  }
  const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 5, 10].find(m => m * power >= raw), found = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high * (1 + 1e-12) + 1e-300; n++) found.push(+(n * step).toPrecision(12));
  return found;
}

// Points [x, y] of a run's evaluations.
function evaluations(run, chart) {
  const xs = column(run, shown.x), at = new Map(column(run, 'step').map((step, i) => [step, xs[i]]));
  const x = step => (shown.x === 'step' ? step : step === 0 ? 0 : at.get(step));
  return (run.evals[chart.metric] || []).map(([step, y]) => [x(step), y * chart.factor]).filter(point => Number.isFinite(point[0]));
}

function seriesOf(chart) {
  const found = [];
  view.runs.forEach((run, i) => {
    if (shown.hidden.has(run.name)) return;
    const raw = points(run, chart.metric, chart.factor);
    if (!raw.some(point => point[1] !== null)) return;
    found.push({ run, i, raw, line: shown.smoothing ? smooth(raw, shown.smoothing) : raw, evals: evaluations(run, chart) });
  });
  return found;
}

function draw(chart) {
  const series = chart.series = seriesOf(chart);
  const width = Math.max(260, Math.round(chart.plot.clientWidth)), height = chart.wide ? 300 : 200;
  const [left, right, top, bottom] = [58, width - 12, 8, height - 34], log = !!shown.log[chart.metric];
  const usable = y => y !== null && (!log || y > 0);
  const inside = x => !shown.zoom || (x >= shown.zoom[0] && x <= shown.zoom[1]);
  let [x0, x1, y0, y1] = [Infinity, -Infinity, Infinity, -Infinity];
  for (const s of series) for (const list of [s.raw, s.line, s.evals]) for (const [x, y] of list) {
    if (!inside(x)) continue;
    x0 = Math.min(x0, x), x1 = Math.max(x1, x);
    if (usable(y)) y0 = Math.min(y0, y), y1 = Math.max(y1, y);
  }
  if (shown.zoom) [x0, x1] = shown.zoom;
  if (x1 <= x0) [x0, x1] = [x0 - 0.5, x0 + 0.5];
  if (x0 === Infinity) [x0, x1] = [0, 1];
  if (y0 === Infinity) [y0, y1] = log ? [0.1, 1] : [0, 1];
  if (log) [y0, y1] = y1 > y0 ? [y0 / 1.1, y1 * 1.1] : [y0 / 2, y1 * 2];
  else {
    const pad = (y1 - y0) * 0.05 || Math.abs(y1) * 0.05 || 0.5;
    [y0, y1] = [y0 >= 0 && y0 < pad * 4 ? 0 : y0 - pad, y1 + pad];
  }
  const X = x => left + (right - left) * (x - x0) / (x1 - x0);
  const Y = log ? y => bottom - (bottom - top) * Math.log(y / y0) / Math.log(y1 / y0) : y => bottom - (bottom - top) * (y - y0) / (y1 - y0);
  const across = ACROSS.find(a => a[0] === shown.x)[1];
  const names = series.map(s => s.run.name).join(', ');
  const root = svg('svg', { viewBox: `0 0 ${width} ${height}`, width, height, tabindex: 0, role: 'img', 'aria-label': `${chart.title} across ${across}: ${names}` });
  const marks = ticks(y0, y1, 5, log), texts = labels(marks);
  marks.forEach((y, n) => root.append(
    svg('line', { class: 'gridline', x1: left, x2: right, y1: Y(y), y2: Y(y) }),
    svg('text', { x: left - 7, y: Y(y) + 4, 'text-anchor': 'end' }, texts[n])));
  for (const x of ticks(x0, x1, width / 90, false)) if (shown.x !== 'step' || Number.isInteger(x))
    root.append(svg('text', { x: X(x), y: bottom + 16, 'text-anchor': 'middle' }, number(x)));
  root.append(svg('text', { x: right, y: bottom + 30, 'text-anchor': 'end' }, across));
  const clip = `clip-${chart.metric}`;
  root.append(svg('clipPath', { id: clip }, svg('rect', { x: left - 5, y: 0, width: right - left + 10, height: bottom + 4 })));
  const area = svg('g', { 'clip-path': `url(#${clip})` });
  const trace = (list, i, extra) => {
    let path = '', open = false, previous = null;
    list.forEach(([x, y], n) => {
      if (!usable(y)) return void (open = false);
      path += `${open ? 'L' : 'M'}${X(x).toFixed(1)} ${Y(y).toFixed(1)}`;
      const next = list[n + 1];
      if (!open && !(next && usable(next[1]))) area.append(svg('circle', { cx: X(x), cy: Y(y), r: 2.5, fill: color(i) }));
      open = true, previous = y;
    });
    if (previous !== null) area.append(svg('path', { d: path, stroke: color(i), ...extra }));
  };
  for (const s of series) {
    if (shown.smoothing) trace(s.raw, s.i, { class: 'raw' });
    trace(s.line, s.i, { 'stroke-dasharray': dashes(s.i) || null, 'data-run': s.run.name, 'data-points': s.line.filter(p => usable(p[1])).length });
    if (view.about_models) trace(s.evals, s.i, { class: 'evals' });
    for (const [x, y] of s.evals) if (usable(y)) area.append(
      svg('circle', { cx: X(x), cy: Y(y), r: 3.5, fill: 'var(--card)', stroke: color(s.i), 'stroke-width': 1.6 }));
  }
  const selection = svg('rect', { class: 'selection', y: top, height: bottom - top, width: 0 });
  chart.cursor = svg('line', { class: 'cursor', y1: top, y2: bottom, visibility: 'hidden' });
  root.append(area, selection, chart.cursor);
  Object.assign(chart, { X, left, right, value: px => x0 + (x1 - x0) * (px - left) / (right - left), width });

  let from = null;
  const at = event => {
    const box = root.getBoundingClientRect();
    return Math.min(right, Math.max(left, (event.clientX - box.left) * width / box.width));
  };
  root.onpointermove = event => {
    hover(chart, chart.value(at(event)));
    if (from === null) return;
    const [a, b] = [Math.min(from, at(event)), Math.max(from, at(event))];
    selection.setAttribute('x', a), selection.setAttribute('width', b - a);
  };
  root.onpointerdown = event => {
    if (event.pointerType !== 'mouse' || event.button) return;
    from = at(event);
    root.setPointerCapture(event.pointerId);
  };
  root.onpointerup = event => {
    const ends = from === null ? [0, 0] : [chart.value(Math.min(from, at(event))), chart.value(Math.max(from, at(event)))];
    const wide = from !== null && Math.abs(at(event) - from) > 8;
    from = null;
    selection.setAttribute('width', 0);
    if (wide) zoom(ends);
  };
  root.onpointerleave = () => hover(null, null);
  root.ondblclick = () => zoom(null);
  root.onblur = () => hover(null, null);
  root.onkeydown = event => {
    const move = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (event.key === 'Escape') return zoom(null), hover(null, null);
    if (!move || !chart.series.length) return;
    event.preventDefault();
    const list = chart.series[0].line.filter(p => inside(p[0]));
    const here = shown.cursor === null ? (move > 0 ? -1 : list.length) : nearest(list, shown.cursor);
    const next = list[Math.min(list.length - 1, Math.max(0, here + move))];
    if (next) hover(chart, next[0]);
  };
  const focused = chart.plot.contains(document.activeElement);
  chart.plot.replaceChildren(root, chart.tip);
  if (focused) root.focus();
}

function nearest(list, x) {
  let [low, high] = [0, list.length - 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (list[middle][0] < x) low = middle + 1;
    else high = middle;
  }
  return low > 0 && x - list[low - 1][0] < list[low][0] - x ? low - 1 : low;
}

// The cursor of all charts, and the values of the one under the pointer.
function hover(over, x) {
  shown.cursor = x;
  for (const chart of charts.values()) {
    if (!chart.cursor) continue;
    const inside = x !== null && chart.X(x) >= chart.left - 1 && chart.X(x) <= chart.right + 1;
    chart.cursor.setAttribute('visibility', inside ? 'visible' : 'hidden');
    chart.tip.hidden = chart !== over || !inside;
    if (!inside) continue;
    chart.cursor.setAttribute('x1', chart.X(x)), chart.cursor.setAttribute('x2', chart.X(x));
    if (chart !== over) continue;
    const found = chart.series.map(s => [s, s.line[nearest(s.line, x)]]);
    const step = found.length ? found[0][1][2] : '';
    const rows = found.slice(0, 14).map(([s, [, y, at]]) => el('div', {},
      el('span', {}, swatch(s.i), s.run.name + (at === step ? '' : ` (step ${at})`)), el('b', {}, y === null ? 'not finite' : number(y))));
    if (found.length > rows.length) rows.push(el('div', {}, `and ${found.length - rows.length} more`));
    chart.tip.replaceChildren(el('b', {}, `step ${step}`), ...rows);
    const middle = (chart.left + chart.right) / 2, px = chart.X(x) / chart.width * 100;
    chart.tip.style.left = chart.X(x) < middle ? `calc(${px}% + 10px)` : '';
    chart.tip.style.right = chart.X(x) < middle ? '' : `calc(${100 - px}% + 10px)`;
  }
}

function zoom(range) {
  shown.zoom = range;
  $('unzoom').hidden = !range;
  drawAll();
}

function curves() {
  const any = view.runs.filter(run => column(run, 'step'));
  $('curves').hidden = !any.length;
  for (const run of any) {
    if (shown.known.has(run.name)) continue;
    shown.known.add(run.name);
    if (any.length > 12 && any.indexOf(run) >= 8) shown.hidden.add(run.name);
  }
  legend(any);
  const options = ACROSS.filter(([name]) => any.some(run => column(run, name)));
  if ($('across').options.length !== options.length)
    $('across').replaceChildren(...options.map(([value, text]) => el('option', { value, selected: value === shown.x ? '' : null }, text)));
  const order = [view.main, ...METRICS.map(m => m[0]).filter(metric => metric !== view.main)];
  for (const [metric, title, own, factor] of METRICS) {
    const unit = metric === 'loss' ? view.loss_over : own;
    const wanted = any.some(run => points(run, metric, factor).some(p => p[1] !== null && (metric !== 'apart' || p[1] > 0)));
    // A run of another task may have come.
    if (charts.has(metric) && metric === 'loss') charts.get(metric).heading.textContent = unit ? `${title} (${unit})` : title;
    if (!wanted || charts.has(metric)) continue;
    const chart = { metric, factor, wide: metric === view.main, title: metric === 'apart' ? `Loss, relative difference to ${baseline().name}` : title };
    const log = el('input', { type: 'checkbox', 'data-log': metric });
    log.checked = !!shown.log[metric];
    log.onchange = () => { shown.log[metric] = log.checked; draw(chart); };
    chart.tip = el('div', { class: 'tip' });
    chart.tip.hidden = true;
    chart.plot = el('div', { class: 'plot', 'data-metric': metric });
    chart.heading = el('h3', {}, chart.title + (unit ? ` (${unit})` : ''));
    const caption = el('figcaption', {}, chart.heading, el('label', {}, log, 'log scale'));
    chart.figure = el('figure', { class: chart.wide ? 'wide' : '' }, caption, chart.plot);
    charts.set(metric, chart);
    chart.place = $(view.about_models && COSTS.includes(metric) ? 'speeds' : 'charts');
    const after = [...charts.values()].filter(c => c.place === chart.place && order.indexOf(c.metric) > order.indexOf(metric));
    const next = after.sort((a, b) => order.indexOf(a.metric) - order.indexOf(b.metric))[0];
    chart.place.insertBefore(chart.figure, next ? next.figure : null);
  }
  drawAll();
}

function drawAll() {
  const cursor = shown.cursor, over = [...charts.values()].find(chart => chart.tip && !chart.tip.hidden);
  for (const chart of charts.values()) draw(chart);
  if (cursor !== null && over) hover(over, cursor);
}

function legend(any) {
  $('many').hidden = any.length < 3;
  $('legend').replaceChildren(...any.map(run => {
    const button = el('button', { type: 'button', 'aria-pressed': String(!shown.hidden.has(run.name)) }, swatch(view.runs.indexOf(run)), run.name);
    button.onclick = () => {
      if (!shown.hidden.delete(run.name)) shown.hidden.add(run.name);
      button.setAttribute('aria-pressed', String(!shown.hidden.has(run.name)));
      drawAll();
    };
    return button;
  }));
}

// ---- Samples of prompts

// For each prompt the first text and the last one side by side, and those between behind a click.
function samples() {
  const having = view.runs.filter(run => run.samples);
  const text = ([step, words, cut]) => el('div', {}, el('b', {}, step ? `after step ${grouped(step)}` : 'before the first step'),
    el('div', { tabindex: 0 }, words, cut ? ' …' : ''));
  const block = (run, { prompt, texts }, n) => {
    const between = texts.slice(1, -1), ends = texts.length > 1 ? [texts[0], texts[texts.length - 1]] : texts, key = `${run.name} ${n}`;
    const more = between.length ? el('details', { open: shown.open.has(key) ? '' : null }, el('summary', {}, between.length > 1 ? `${between.length} evaluations between` : '1 evaluation between'), el('div', { class: 'texts' }, ...between.map(text))) : null;
    if (more) more.ontoggle = () => shown.open[more.open ? 'add' : 'delete'](key);
    return el('div', { class: 'sample' }, el('p', { tabindex: 0 }, prompt), el('div', { class: 'texts' }, ...ends.map(text)), more);
  };
  $('samples').hidden = !having.length;
  $('samples').replaceChildren(...having.flatMap(run => [
    el('figcaption', {}, el('h3', {}, view.runs.length > 1 ? `Samples of ${run.name}` : 'Samples')),
    ...run.samples.prompts.map((of, n) => block(run, of, n)),
    run.samples.more ? el('p', { class: 'quiet note' }, `The metrics file has ${run.samples.more} more prompts.`) : '',
  ]));
  if (charts.has(view.main)) charts.get(view.main).figure.after($('samples'));
}

// ---- Bars

const part = (share, fill, hint) => el('i', { style: `width:${(100 * share).toFixed(2)}%;background:${fill}`, title: hint });
const bar = (run, lines, value) => el('div', { class: run.baseline ? 'bar baseline' : 'bar' },
  el('span', { class: 'name' }, run.name), el('div', { class: 'track' }, ...lines), el('span', { class: 'value' }, value));
const keys = list => el('div', { class: 'keys' }, ...list.map(([fill, text]) => el('span', {}, el('i', { style: `background:${fill}` }), text)));

function panel(title, note, list, extra = null) {
  return list.length ? el('figure', {}, el('figcaption', {}, el('h3', {}, title)), el('p', { class: 'quiet note' }, note), extra, el('div', { class: 'bars' }, ...list)) : null;
}

function bars() {
  const ratio = (x, base) => (base > 0 && view.runs.length > 1 && !view.about_models ? ` (${(x / base).toFixed(2)}x)` : '');
  const having = (...names) => view.runs.map((run, i) => [run, i, run.costs]).filter(([, , costs]) => costs && names.some(name => costs[name] !== null));
  const base = (baseline() || {}).costs || {}, most = (list, value) => Math.max(...list.map(([, , costs]) => value(costs)), 1e-300);
  const figures = [];

  let list = having('speed'), longest = most(list, costs => costs.speed[2]);
  figures.push(panel('Throughput', 'Tokens per second of the whole job, median step; longer is better. A line spans several rounds.', list.map(([run, i, costs]) => {
    const [median, low, high] = costs.speed, line = el('div', {}, part(median / longest, color(i), `${grouped(median)} tokens/s`));
    if (high > low && costs.rounds > 1) line.append(el('span', { class: 'range', style: `left:${100 * low / longest}%;width:${100 * (high - low) / longest}%` }));
    return bar(run, [line], grouped(median) + ratio(median, base.speed ? base.speed[0] : 0));
  })));

  list = having('peak');
  const planned = costs => MEMORY.reduce((sum, [name]) => sum + (costs.plan[name] || 0), 0);
  longest = most(list, costs => Math.max(costs.peak, planned(costs)));
  const used = MEMORY.filter(([name]) => list.some(([, , costs]) => costs.plan[name]));
  const fills = [['var(--busy)', 'measured peak'], ...used.map(([name, n]) => [color(n), `planned ${name}`])];
  figures.push(panel('Peak memory and its plan', 'MiB of the rank that holds most; shorter is better. The measurement includes the program itself.', list.map(([run, , costs]) => {
    const plan = planned(costs), lines = [el('div', {}, part(costs.peak / longest, 'var(--busy)', `measured ${grouped(costs.peak / MIB, 1)} MiB`))];
    if (plan) lines.push(el('div', { class: 'thin' }, ...used.map(([name, n]) =>
      part((costs.plan[name] || 0) / longest, color(n), `planned ${name}: ${grouped((costs.plan[name] || 0) / MIB, 1)} MiB`))));
    return bar(run, lines, mib(costs.peak) + (plan ? ` (plan ${mib(plan)})` : ratio(costs.peak, base.peak)));
  }), list.length ? keys(fills) : null));

  list = having('step_time');
  longest = most(list, costs => costs.step_time);
  figures.push(panel('Step time', 'Median of an optimizer step; shorter is better.', list.map(([run, , costs]) => {
    const exposed = Math.min(costs.exposed || 0, costs.step_time), ms = 1e3 * costs.step_time;
    const line = el('div', {}, part(exposed / longest, 'var(--exposed)', 'exposed communication'), part((costs.step_time - exposed) / longest, 'var(--busy)', 'everything else'));
    return bar(run, [line], `${grouped(ms, ms < 100 ? 1 : 0)} ms${costs.exposed === null ? '' : `, ${Math.round(100 * exposed / costs.step_time)} % exposed`}`);
  }), list.length ? keys([['var(--exposed)', 'exposed communication'], ['var(--busy)', 'everything else']]) : null));

  list = having('comm');
  longest = most(list, costs => costs.comm);
  figures.push(panel('Communication', 'MiB that rank 0 receives in an optimizer step; shorter is better.', list.map(([run, i, costs]) =>
    bar(run, [el('div', {}, part(costs.comm / longest, color(i), ''))], grouped(costs.comm / MIB, 1) + ratio(costs.comm, base.comm)))));

  const drawn = figures.filter(figure => figure);
  $('bars').replaceChildren(...drawn);
  $('costs').hidden = !drawn.length;
}

// A single run's hyperparameters, or what differs between the runs.
function settings() {
  const { runs, rows } = view.settings;
  const cell = (tag, text) => el(tag, {}, text);
  $('settings').hidden = !rows.length;
  $('costs')[view.about_models ? 'before' : 'after']($('settings'));
  $('settings-title').textContent = runs.length > 1 ? 'Settings that differ' : 'Hyperparameters';
  $('values').tHead.replaceChildren(...(runs.length > 1 ? [el('tr', {}, cell('th', 'setting'), ...runs.map(name => cell('th', name)))] : []));
  $('values').tBodies[0].replaceChildren(...rows.map(row => el('tr', {}, ...row.map(text => cell('td', text)))));
}

function traces() {
  const token = new URLSearchParams(location.search).get('token');
  const found = view.runs.flatMap(run => (run.traces || []).map(trace => {
    const href = trace.href + (view.live && token ? `?token=${encodeURIComponent(token)}` : '');
    const picture = trace.picture ? el('a', { href }, el('img', { src: trace.picture, alt: `Timeline of a step of ${run.name}` })) : null;
    const figure = el('figure', { class: 'thumb' }, el('figcaption', {}, el('h3', {}, run.name)), picture, el('p', {}, el('a', { href }, trace.file), ` ${trace.about}`));
    return figure;
  }));
  $('traces').replaceChildren(...found);
  $('lanes').replaceChildren(keys(view.lanes));
  $('timelines').hidden = !found.length;
}

// ---- Controls and live updates

function render() {
  cards();
  heads();
  rows();
  bars();
  curves();
  samples();
  settings();
  traces();
}

const redraw = () => requestAnimationFrame(drawAll);
$('smoothing').oninput = () => { shown.smoothing = +$('smoothing').value; $('smoothed').textContent = shown.smoothing || '0'; redraw(); };
$('across').onchange = () => { shown.x = $('across').value; zoom(null); };
$('unzoom').onclick = () => zoom(null);
$('all').onclick = () => { shown.hidden.clear(); curves(); };
$('none').onclick = () => { view.runs.forEach(run => shown.hidden.add(run.name)); curves(); };
addEventListener('resize', redraw);

const themes = ['auto', 'light', 'dark'];
const stored = () => { try { return localStorage.getItem('theme'); } catch { return null; } };
function theme(name) {
  document.documentElement.style.colorScheme = name === 'auto' ? '' : name;
  $('theme').textContent = `Theme: ${name}`;
  $('theme').onclick = () => {
    const next = themes[(themes.indexOf(name) + 1) % 3];
    try { localStorage.setItem('theme', next); } catch { /* a page from a file may have no storage */ }
    theme(next);
  };
}
theme(themes.includes(stored()) ? stored() : 'auto');
render();

// Sends the versions it has, so that only changed runs come back.
async function poll() {
  const query = new URLSearchParams({ have: view.runs.map(run => run.version).join(',') });
  const token = new URLSearchParams(location.search).get('token');
  if (token) query.set('token', token);
  try {
    const reply = await fetch(`data?${query}`, { cache: 'no-store' });
    if (!reply.ok) throw new Error(reply.status);
    const next = await reply.json();
    const before = JSON.stringify(view.runs.map(run => [run.version, run.badge, run.message]));
    next.runs.forEach((run, i) => { if (run.columns === null && view.runs[i]) Object.assign(run, { columns: view.runs[i].columns, evals: view.runs[i].evals, samples: view.runs[i].samples, traces: view.runs[i].traces }); });
    Object.assign(view, next);
    if (before !== JSON.stringify(view.runs.map(run => [run.version, run.badge, run.message]))) render();
    say(view.runs.some(run => run.status === 'running' || run.status === 'waiting') ? 'live' : 'all runs ended');
  } catch {
    say('connection lost, trying again');
  }
  setTimeout(poll, document.hidden ? 5000 : 1000);
}
const say = text => { if ($('state').textContent !== text) $('state').textContent = text; };
if (view.live) poll();
})();
