"use strict";
(function () {
  const plots = JSON.parse(document.getElementById("plots").textContent);
  const root = document.documentElement;
  const drawn = [];
  const sync = uPlot.sync("step");

  function colour(name) {
    return getComputedStyle(root).getPropertyValue("--" + name).trim();
  }

  function shown(value) {
    if (value == null) return "";
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2);
    return value.toLocaleString("en", { maximumSignificantDigits: 5 });
  }

  function axis(extra) {
    return Object.assign(
      { stroke: colour("faint"), grid: { stroke: colour("line"), width: 1 },
        ticks: { stroke: colour("line"), width: 1 } },
      extra
    );
  }

  function options(plot, width) {
    const series = [{ label: "step" }];
    const bands = [];
    plot.series.forEach(function (one) {
      const stroke = colour(one.colour);
      const at = series.length;
      series.push({ label: plot.series.length === 1 ? "value" : one.label, stroke: stroke, width: 1.5, spanGaps: true,
        points: { show: one.dots }, value: (u, v) => shown(v) });
      if (one.ranged) {
        series.push({ label: "least", stroke: "transparent", points: { show: false } });
        series.push({ label: "greatest", stroke: "transparent", points: { show: false } });
        bands.push({ series: [at + 2, at + 1], fill: stroke + "33" });
      }
    });
    return {
      width: width, height: 210, series: series, bands: bands,
      scales: { x: { time: false }, y: { distr: plot.log ? 3 : 1 } },
      axes: [axis({}), axis({ size: 62, values: (u, values) => values.map(shown) })],
      cursor: { sync: { key: sync.key }, focus: { prox: 30 } },
      legend: { live: true },
    };
  }

  function draw() {
    drawn.splice(0).forEach((plot) => plot.destroy());
    plots.forEach(function (plot, number) {
      const place = document.getElementById("plot-" + number);
      const made = new uPlot(options(plot, place.clientWidth), plot.data, place);
      made.root.querySelectorAll(".u-series").forEach(function (row) {
        const label = row.querySelector(".u-label").textContent;
        if (label === "least" || label === "greatest") row.style.display = "none";
      });
      drawn.push(made);
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
