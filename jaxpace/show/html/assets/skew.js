// The map of ranks and steps: painted pixel by pixel, so that a thousand ranks are as quick as four.
let rowsInView = null;

function startSkew() {
  const map = series.skew;
  if (!map) return;
  const columns = new Columns(map.columns), rows = map.rows, unit = map.unit;
  const values = mode => mode === "latest step" ? map.most : map.mean;
  const lowest = rows.first[0] - 0.5, highest = rows.last[rows.last.length - 1] + 0.5;
  const ranksInView = () => rowsInView || [lowest, highest];
  const name = row => rows.first[row] === rows.last[row] ? `rank ${rows.first[row]}` : `ranks ${rows.first[row]} to ${rows.last[row]}`;
  const hostOf = rank => report.per_rank[rank].host;
  const rowAt = rank => Math.max(0, Math.min(rows.first.length - 1, lastAtMost(rows.first, Math.round(rank))));

  /**
   * The lateness that has the full colour: nearly the highest in view, so that one pause doesn't bleach the rest; but a
   * twentieth of the step at least, so that noise stays pale.
   */
  function scale(mode) {
    const [from, to] = columns.shown, [low, high] = ranksInView().map(rowAt), of = values(mode);
    const sizes = new Int32Array((high - low + 1) * (to - from + 1));
    let known = 0;
    for (let row = low; row <= high; row++) {
      for (let column = from; column <= to; column++) {
        if (of[row][column] !== null) sizes[known++] = Math.abs(of[row][column]);
      }
    }
    const least = Math.max(0.05 * report.step_time.mean / unit, 1);
    return known ? Math.max(sizes.subarray(0, known).sort()[Math.floor(0.995 * (known - 1))], least) : least;
  }

  function paint(size, mode, full) {
    const ratio = Math.max(1, Math.min(2, window.devicePixelRatio || 1));
    const width = Math.max(1, Math.round(size.width * ratio)), height = Math.max(1, Math.round(size.height * ratio));
    const canvas = document.createElement("canvas");
    canvas.width = width;
    canvas.height = height;
    const brush = canvas.getContext("2d"), image = brush.createImageData(width, height), ramp = ramps();
    const [top, bottom] = ranksInView(), of = values(mode);
    // First and last column under each pixel's column; -1 where no step counts.
    const from = new Int32Array(width), to = new Int32Array(width);
    for (let x = 0; x < width; x++) {
      const begin = view.first - 0.5 + (view.last - view.first + 1) * x / width, end = begin + (view.last - view.first + 1) / width;
      let first = lastAtMost(columns.first, begin + 0.5), last = lastAtMost(columns.first, end + 0.5 - 1e-9);
      if (first < 0 || columns.last[first] + 0.5 <= begin) first++;
      from[x] = first;
      to[x] = Math.min(last, columns.size - 1);
    }
    const out = new Uint32Array(image.data.buffer);
    for (let y = 0; y < height; y++) {
      const begin = rowAt(top + (bottom - top) * y / height + 0.0), end = rowAt(top + (bottom - top) * (y + 1) / height - 1e-6);
      for (let x = 0; x < width; x++) {
        // The latest one, and else the earliest one, of what lies under a pixel: a single late rank stays visible.
        let high = -Infinity, low = Infinity;
        for (let row = begin; row <= end; row++) {
          const line = of[row];
          for (let column = from[x]; column <= to[x]; column++) {
            const value = line[column];
            if (value === null) continue;
            if (value > high) high = value;
            if (value < low) low = value;
          }
        }
        if (high === -Infinity) continue;
        const value = high >= -low ? high : low;
        out[y * width + x] = ramp[Math.round(127 + 127 * Math.max(-1, Math.min(1, value / full)))];
      }
    }
    brush.putImageData(image, 0, 0);
    return canvas;
  }

  const chart = new Chart("skew", {
    overSteps: true, items: () => columns.size * rows.first.length,
    margins: width => width < 620 ? {bottom: 76} : {bottom: 76},
    step: item => item === null ? null : columns.middle[item % columns.size],
    range: own => {
      const row = own.item === null ? rowAt(ranksInView()[0] + 0.5) : Math.floor(own.item / columns.size);
      return columns.shown.map(column => row * columns.size + column);
    },
    up: (item, by) => {
      const [low, high] = [rowAt(ranksInView()[0] + 0.5), rowAt(ranksInView()[1] - 0.5)];
      if (item === null) return low * columns.size + columns.shown[0];
      const row = Math.max(low, Math.min(high, Math.floor(item / columns.size) + by));
      return row * columns.size + item % columns.size;
    },
    rows: (a, b) => {
      const [low, high] = [Math.min(a, b), Math.max(a, b)].map(rank => Math.max(lowest, Math.min(highest, rank)));
      rowsInView = [rows.first[rowAt(low)] - 0.5, rows.last[rowAt(high)] + 0.5];
    },
    at: (x, y, own) => {
      const [step, rank] = own.data(x, y);
      return rowAt(rank) * columns.size + columns.at(step);
    },
    place: (item, own) => own.pixel(columns.middle[item % columns.size], (rows.first[Math.floor(item / columns.size)]
      + rows.last[Math.floor(item / columns.size)]) / 2),
    option: (size, mode, own) => {
      own.full = scale(mode);
      const picture = paint(size, mode, own.full), [top, bottom] = ranksInView();
      return {
        xAxis: stepAxis(),
        yAxis: axis({type: "value", inverse: true, min: top, max: bottom, name: "rank", nameGap: 46, splitLine: {show: false},
          interval: Math.max(1, Math.ceil((bottom - top) / 12)), axisLabel: {show: false}, axisTick: {show: false}}),
        series: [{type: "custom", silent: true, data: [0], renderItem: () => ({type: "image",
          style: {image: picture, x: size.left, y: size.top, width: size.width, height: size.height}})}],
      };
    },
    drawn: own => {
      shade(own);
      const {left, top, width, height} = own.grid, [low, high] = ranksInView();
      const every = Math.max(1, nice((high - low) / (height / 22))) | 0 || 1;
      for (let rank = Math.ceil(low / every) * every; rank < high; rank += every) {
        label(own, String(rank), left - 8, own.pixel(view.first, rank)[1] - 8, "tick");
      }
      if (own.width >= 620) {
        const shown = (showing || []).filter(rank => rank > low && rank < high).slice(0, 12);
        const named = [...new Set(report.findings.flatMap(finding => finding.ranks))].sort((a, b) => a - b);
        const late = shown.length ? shown : named.filter(rank => rank > low && rank < high).slice(0, 12);
        for (const {rank, y} of apart(late.map(rank => ({rank, y: own.pixel(view.first, rank)[1]})))) {
          label(own, `◂ rank ${rank}`, left + width + 6, y - 8, "end strong");
        }
      }
      legend(own, unit * own.full);
    },
    read: (item, mode) => {
      const row = Math.floor(item / columns.size), column = item % columns.size, value = values("mean")[row][column];
      const told = [["mean", value === null ? "not recorded" : lateBy(value * unit)]];
      if (map.most && map.most[row][column] !== null) told.push(["latest step", lateBy(map.most[row][column] * unit)]);
      const host = hostOf(rows.first[row]);
      if (host) told.push(["host", host]);
      return {title: `${name(row)[0].toUpperCase()}${name(row).slice(1)}, ${columns.title(column).toLowerCase()}`, rows: told};
    },
    table: mode => {
      // As wide as a table can be: the columns of steps taken together by tens.
      const together = Math.ceil(columns.size / 24), groups = [];
      for (let begin = 0; begin < columns.size; begin += together) groups.push([begin, Math.min(begin + together, columns.size) - 1]);
      const cell = (row, [begin, end]) => {
        let total = 0, number = 0, most = -Infinity;
        for (let i = begin; i <= end; i++) {
          const value = values(mode)[row][i];
          if (value === null) continue;
          total += value * columns.number[i];
          number += columns.number[i];
          most = Math.max(most, value);
        }
        return number ? lateBy((mode === "latest step" ? most : total / number) * unit) : "–";
      };
      return {head: ["rank", ...groups.map(([begin, end]) => stepsFrom(columns.first[begin], columns.last[end]))],
        rows: rows.first.map((_, row) => [name(row), ...groups.map(group => cell(row, group))])};
    },
    summary: () => {
      const late = report.per_rank.filter(row => row.late).map(row => row.rank);
      return `A map of ${whole(report.ranks)} ranks by steps. ${late.length ? `Late: rank ${late.slice(0, 12).join(", ")}.`
        : "No rank is persistently late."}`;
    },
  });
  draggable(chart);
}

/** 255 colours from early over in time to late, as the canvas has them: red in the lowest byte. */
function ramps() {
  const parse = text => text.match(/[0-9a-f]{2}/gi).map(part => parseInt(part, 16));
  const stops = ["early-2", "early-1", "in-time", "late-1", "late-2"].map(name => parse(colour(name)));
  return Uint32Array.from({length: 255}, (_, i) => {
    const at = i / 254 * 4, stop = Math.min(3, Math.floor(at)), part = at - stop;
    const [r, g, b] = [0, 1, 2].map(c => Math.round(stops[stop][c] * (1 - part) + stops[stop + 1][c] * part));
    return (255 << 24 | b << 16 | g << 8 | r) >>> 0;
  });
}

/** The scale of colours, below the map. */
function legend(chart, full) {
  const {left, top, height} = chart.grid, width = Math.min(320, chart.grid.width), canvas = make("canvas", {class: "ramp", width: 255, height: 1});
  const brush = canvas.getContext("2d"), image = brush.createImageData(255, 1);
  new Uint32Array(image.data.buffer).set(ramps());
  brush.putImageData(image, 0, 0);
  const y = top + height + 48;
  Object.assign(canvas.style, {left: `${left}px`, top: `${y + 2}px`, width: `${width}px`});
  chart.over.append(canvas);
  label(chart, `${lateBy(-full)}, early`, left, y + 13, "scale");
  label(chart, "0", left + width / 2, y + 13, "scale middle");
  label(chart, `late, ${lateBy(full)}`, left + width, y + 13, "scale far");
}
