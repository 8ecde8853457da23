"use strict";
(function () {
  const plots = JSON.parse(document.getElementById("plots").textContent);
  const root = document.documentElement;
  const drawn = [];
  const sync = uPlot.sync("step");
  const steps = [0, 1, 2, 3, 4, 5, 6, 7, 8].flatMap((e) => [1, 2, 5].map((n) => n * 10 ** e));

  function colour(name) {
    return getComputedStyle(root).getPropertyValue("--" + name).trim();
  }

  function exponent(value) {
    return Number(value.toPrecision(3)).toExponential();
  }

  function shown(value) {
    if (value == null) return "";
    const size = Math.abs(value);
    if (size !== 0 && size < 1e-3) return exponent(value);
    if (size >= 1e6) return value.toLocaleString("en", { notation: "compact", maximumSignificantDigits: 4 });
    return value.toLocaleString("en", { maximumSignificantDigits: 5 });
  }

  function ticks(u, values, number, space, step) {
    const known = values.filter((value) => value != null).map(Math.abs);
    const most = Math.max(...known);
    if (most < 1e-2) return values.map((value) => value == null ? "" : value === 0 ? "0" : exponent(value));
    if (most >= 1e6 || !(step > 0)) return values.map(shown);
    let digits = 0;
    while (digits < 8 && Math.abs(step * 10 ** digits - Math.round(step * 10 ** digits)) > 1e-6) digits++;
    return values.map((value) => value == null ? "" : value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits }));
  }

  function fitted(low, high, log) {
    if (low == null) return log ? [0.1, 1] : [0, 1];
    if (log) return [low / 1.15, high * 1.15];
    const room = 0.05 * (high - low) || 0.05 * Math.abs(high) || 1;
    return [low >= 0 ? Math.max(0, low - room) : low - room, high + room];
  }

  function axis(extra) {
    return Object.assign(
      { stroke: colour("faint"), grid: { stroke: colour("line"), width: 1 },
        ticks: { stroke: colour("line"), width: 1, size: 5 } },
      extra
    );
  }

  function options(plot, place) {
    const series = [{}];
    const bands = [];
    const outputs = place.parentElement.querySelectorAll("output");
    const columns = [];
    plot.series.forEach(function (one) {
      const stroke = colour(one.colour);
      const at = series.length;
      columns.push(at);
      series.push({ stroke: stroke, width: 1.5, spanGaps: true, dash: [[], [6, 3], [2, 2]][one.dash % 3],
        points: { show: one.dots, size: 6, fill: stroke } });
      if (one.ranged) {
        series.push({ stroke: "transparent", points: { show: false } });
        series.push({ stroke: "transparent", points: { show: false } });
        bands.push({ series: [at + 2, at + 1], fill: stroke + "33" });
      }
    });
    function tell(u) {
      const at = u.cursor.idx;
      const found = columns.map(function (column, number) {
        let known = at;  // the newest evaluation counts until the next
        while (plot.series[number].dots && known > 0 && u.data[column][known] == null) known--;
        return at == null ? "" : shown(u.data[column][known]);
      });
      const step = at == null ? "" : "step " + u.data[0][at].toLocaleString("en");
      const single = columns.length === 1;
      outputs[0].textContent = single && step ? step + ": " + found[0] : step;
      if (!single) found.forEach((text, number) => { outputs[number + 1].textContent = text; });
    }
    return {
      width: place.clientWidth, height: 200, series: series, bands: bands, padding: [8, 10, 0, 0],
      scales: {
        x: { time: false, range: (u, low, high) => low === high ? [low - 1, high + 1] : [low, high] },
        y: { distr: plot.log ? 3 : 1, range: (u, low, high) => fitted(low, high, plot.log) },
      },
      axes: [
        axis({ size: 30, incrs: steps, values: (u, values) => values.map((value) => value.toLocaleString("en")) }),
        axis({ size: 58, values: ticks }),
      ],
      cursor: { sync: { key: sync.key }, focus: { prox: 30 } },
      legend: { show: false },
      hooks: { setCursor: [tell] },
    };
  }

  function draw() {
    drawn.splice(0).forEach((plot) => plot.destroy());
    plots.forEach(function (plot, number) {
      const place = document.getElementById("plot-" + number);
      drawn.push(new uPlot(options(plot, place), plot.data, place));
    });
  }

  document.getElementById("theme").addEventListener("click", function () {
    const dark = getComputedStyle(root).colorScheme.includes("dark");
    root.dataset.theme = dark ? "light" : "dark";
    draw();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  let waiting = 0;
  addEventListener("resize", function () {
    clearTimeout(waiting);
    waiting = setTimeout(draw, 100);
  });
  draw();
})();
