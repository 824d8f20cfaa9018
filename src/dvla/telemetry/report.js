// What the curves are under the pointer; and how wide the swimlanes are.
for (const figure of document.querySelectorAll("figure[data-series]")) {
  const series = JSON.parse(figure.dataset.series);
  const [left, right, top, bottom, low, high] = figure.dataset.area.split(" ").map(Number);
  const svg = figure.querySelector("svg"), output = figure.querySelector("output");
  const line = document.createElementNS(svg.namespaceURI, "line");
  line.setAttribute("class", "pointer");
  line.setAttribute("y1", top);
  line.setAttribute("y2", bottom);
  const short = (y) => (Math.abs(y) >= 1e5 || (y && Math.abs(y) < 1e-3) ? y.toExponential(2) : +y.toPrecision(4));
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const place = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
    const x = low + ((place - left) / (right - left)) * (high - low);
    const near = series.map(({ name, points }) => [
      name, points.reduce((a, b) => (Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a)),
    ]);
    const at = near[0][1][0], drawn = high > low ? left + ((at - low) / (high - low)) * (right - left) : (left + right) / 2;
    line.setAttribute("x1", drawn);
    line.setAttribute("x2", drawn);
    svg.append(line);
    output.textContent = `step ${Math.round(at)}: ` +
      near.filter(([, p]) => p[1] || near.length < 5).map(([n, p]) => `${n} ${short(p[1])}`).join(", ");
  });
  svg.addEventListener("pointerleave", () => {
    line.remove();
    output.textContent = "";
  });
}
for (const zoom of document.querySelectorAll("input.zoom")) {
  zoom.addEventListener("input", () => {
    const timeline = document.querySelector(".timeline");
    timeline.style.width = `${100 * zoom.value}%`;
    timeline.classList.toggle("wide", zoom.value >= 5);
  });
}
