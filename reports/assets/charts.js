// Draws each chart again with uPlot, so that it can be pointed at, zoomed and walked through with the arrow keys.
// Without this script the picture that stands in the page stays; nothing is fetched.
"use strict";
(() => {
  const HEIGHT = 220;
  const colour = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  const marks = data => u => {
    const draw = (places, name, dash) => {
      u.ctx.save();
      u.ctx.strokeStyle = colour(name);
      u.ctx.lineWidth = devicePixelRatio;
      u.ctx.setLineDash(dash.map(length => length * devicePixelRatio));
      for (const place of places) {
        const x = Math.round(u.valToPos(place, "x", true));
        u.ctx.beginPath();
        u.ctx.moveTo(x, u.bbox.top);
        u.ctx.lineTo(x, u.bbox.top + u.bbox.height);
        u.ctx.stroke();
      }
      u.ctx.restore();
    };
    draw(data.breaks, "--soft", [2, 4]);
    draw(data.changes, "--above", [6, 4]);
  };

  const lineOf = line => {
    const stroke = colour(`--line-${line.kind}`);
    const bound = { stroke: "transparent", points: { show: false } };
    const warn = colour("--warn");
    return [
      { stroke, width: 2, dash: line.kind === 1 ? [6, 3] : undefined, spanGaps: true, points: { show: true, size: 7, fill: stroke } },
      bound, bound,
      { stroke: "transparent", points: { show: true, size: 7, fill: warn, stroke: warn } },
    ];
  };

  const optionsOf = (data, width, told) => {
    const axis = { stroke: colour("--soft"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line") } };
    const isOneDay = new Set(data.when.map(when => when.slice(0, 10))).size === 1;
    const day = place => (data.when[place] ?? "").slice(...(isOneDay ? [11, 16] : [0, 10]));
    const say = u => {
      const place = u.cursor.idx;
      const values = place == null ? [] : data.lines.map(line => `${line.label} ${line.told[place] ?? "none"}`);
      told.textContent = values.length ? `${data.when[place]}: ${values.join("; ")}` : "";
    };
    return {
      width, height: HEIGHT, legend: { show: false }, padding: [12, 40, 0, 0],
      scales: { x: { time: false, range: (u, low, high) => low === high ? [low - 1, high + 1] : [low, high] } },
      axes: [
        { ...axis, space: 90, incrs: [1, 2, 5, 10, 20, 50], values: (u, splits) => splits.map(day) },
        { ...axis, size: 64, label: data.unit || undefined, labelSize: 20 },
      ],
      series: [{}, ...data.drawn.flatMap(lineOf)],
      bands: data.drawn.map((line, at) => ({ series: [4 * at + 3, 4 * at + 2], fill: colour(`--line-${line.kind}`) + "33" })),
      hooks: { drawClear: [marks(data)], setCursor: [say] },
    };
  };

  const walk = (u, last) => event => {
    const at = u.cursor.idx;
    const next = { ArrowLeft: (at ?? last + 1) - 1, ArrowRight: (at ?? -1) + 1, Home: 0, End: last }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    u.setCursor({ left: u.valToPos(Math.min(last, Math.max(0, next)), "x"), top: HEIGHT / 3 });
  };

  const draw = figure => {
    const data = JSON.parse(figure.dataset.chart);
    data.drawn = [...data.lines].reverse(); // the first line is drawn last, over the others
    const room = figure.querySelector(".chart-drawn");
    const columns = [
      data.when.map((_, place) => place),
      ...data.drawn.flatMap(line => [line.values, line.low, line.high, line.struck]),
    ];
    room.hidden = false;
    figure.classList.add("drawn");
    const u = new uPlot(optionsOf(data, room.clientWidth, figure.querySelector(".chart-told")), columns, room);
    room.onkeydown = walk(u, data.when.length - 1);
    const fit = new ResizeObserver(() => u.setSize({ width: room.clientWidth, height: HEIGHT }));
    fit.observe(room);
    return () => { fit.disconnect(); u.destroy(); };
  };

  const figures = [...document.querySelectorAll("[data-chart]")];
  let drawn = figures.map(draw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    drawn.forEach(end => end());
    drawn = figures.map(draw);
  });
})();
