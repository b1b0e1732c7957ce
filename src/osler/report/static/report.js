"use strict";
// Reads values under the pointer or the arrow keys, walks the findings with j and k. The page is complete without it.
(() => {
  const data = JSON.parse(document.getElementById("model").textContent);
  const figure = (v) => v === null || v === undefined ? "–" : v === 0 ? "0"
    : Math.abs(v) >= 1e5 || Math.abs(v) < 1e-3 ? v.toExponential(2) : String(+v.toPrecision(3));

  /** Index of the bucket that holds step x. */
  const bucket = (ends, x) => {
    let low = 0, high = ends.length - 1;
    while (low < high) { const mid = (low + high) >> 1; if (ends[mid] < x) low = mid + 1; else high = mid; }
    return low;
  };

  for (const plot of document.querySelectorAll(".plot[data-series]")) {
    const names = plot.dataset.series.split(" ").filter((n) => data.series[n]);
    const first = +plot.dataset.first, last = +plot.dataset.last;
    const cursor = plot.querySelector(".cursor"), out = plot.parentElement.querySelector("output");
    let at = first;
    const show = (x) => {
      at = Math.min(last, Math.max(first, Math.round(x)));
      cursor.style.left = `${100 * (at - first) / Math.max(1, last - first)}%`;
      plot.classList.add("live");
      out.textContent = `step ${at}  ` + names.map((name) => {
        const s = data.series[name], i = bucket(s.end, at);
        const range = s.min[i] === s.max[i] ? figure(s.max[i]) : `${figure(s.min[i])} … ${figure(s.max[i])}`;
        return names.length > 1 ? `${s.label} ${range}` : range;
      }).join("  ");
    };
    const hide = () => { plot.classList.remove("live"); out.textContent = ""; };
    plot.addEventListener("pointermove", (e) => {
      const box = plot.getBoundingClientRect();
      show(first + (last - first) * (e.clientX - box.left) / box.width);
    });
    plot.addEventListener("pointerleave", hide);
    plot.addEventListener("blur", hide);
    plot.addEventListener("keydown", (e) => {
      const step = Math.max(1, Math.round((last - first) / (e.shiftKey ? 10 : 100)));
      const move = { ArrowRight: at + step, ArrowLeft: at - step, Home: first, End: last }[e.key];
      if (move !== undefined) { show(move); e.preventDefault(); }
    });
  }

  const findings = [...document.querySelectorAll(".finding")];
  let here = -1;
  document.addEventListener("focusin", (e) => { const i = findings.indexOf(e.target.closest(".finding")); if (i >= 0) here = i; });
  document.addEventListener("keydown", (e) => {
    if (e.ctrlKey || e.metaKey || e.altKey || !findings.length) return;
    const next = { j: here + 1, k: here - 1 }[e.key];
    if (next === undefined) return;
    here = Math.min(findings.length - 1, Math.max(0, next));
    findings[here].focus({ preventScroll: true });
    findings[here].scrollIntoView({ block: "start" });
  });

  addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((d) => { d.open = true; }));
})();
