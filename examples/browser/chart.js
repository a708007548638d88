// A curve on a logarithmic scale, as SVG.

const SVG = "http://www.w3.org/2000/svg";
const FRAME = { left: 56, right: 706, top: 30, bottom: 270 };

export class LossChart {
  /** Draws axes for `steps` steps and for losses in the range of `reference`, and the reference's curve. */
  constructor(svg, reference) {
    this.svg = svg;
    this.steps = reference.length;
    this.highest = Math.log10(Math.max(...reference) * 1.3);
    this.lowest = Math.log10(Math.min(...reference) / 1.3);
    this.drawAxes();
    this.add("polyline", { class: "reference", points: this.points(reference) });
    this.curve = this.add("polyline", { class: "live" });
  }

  /** Draws the losses so far. */
  update(losses) {
    this.curve.setAttribute("points", this.points(losses));
  }

  points(losses) {
    return losses.map((loss, step) => `${this.x(step + 1).toFixed(1)},${this.y(loss).toFixed(1)}`).join(" ");
  }

  x(step) {
    return FRAME.left + (step / this.steps) * (FRAME.right - FRAME.left);
  }

  y(loss) {
    const part = (this.highest - Math.log10(loss)) / (this.highest - this.lowest);
    return FRAME.top + Math.min(Math.max(part, 0), 1) * (FRAME.bottom - FRAME.top);
  }

  drawAxes() {
    for (let power = Math.floor(this.lowest); power <= Math.ceil(this.highest); power += 1) {
      for (const digit of [1, 2, 5]) {
        const loss = Number(`${digit}e${power}`);
        const exponent = Math.log10(loss);
        if (exponent < this.lowest || exponent > this.highest) continue;
        const y = this.y(loss);
        this.add("line", { class: "grid", x1: FRAME.left, x2: FRAME.right, y1: y, y2: y });
        this.add("text", { x: FRAME.left - 8, y: y + 4, "text-anchor": "end" }, String(loss));
      }
    }
    const interval = this.steps > 500 ? 100 : 50;
    for (let step = 0; step <= this.steps; step += interval) {
      this.add("text", { x: this.x(step), y: FRAME.bottom + 22, "text-anchor": "middle" }, String(step));
    }
    this.add("text", { x: FRAME.right, y: FRAME.bottom + 44, "text-anchor": "end" }, "step");
    this.add("text", { x: FRAME.left - 8, y: 16, "text-anchor": "end" }, "loss");
  }

  add(kind, attributes, text = "") {
    const element = document.createElementNS(SVG, kind);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.textContent = text;
    return this.svg.appendChild(element);
  }
}
