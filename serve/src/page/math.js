// TeX formulas as MathML, as far as models use them. An unknown command is shown by its name, and what is
// no formula as its source: nothing is left out.

const SPACE = "http://www.w3.org/1998/Math/MathML";
/// Groups within groups; deeper ones are no formula.
const DEEPEST = 64;

const words = (text) => Object.fromEntries(text.split(/\s+/).filter(Boolean).map((pair) => pair.split("=")));

const LETTERS = words(`alpha=α beta=β gamma=γ delta=δ epsilon=ϵ varepsilon=ε zeta=ζ eta=η theta=θ vartheta=ϑ iota=ι
  kappa=κ lambda=λ mu=μ nu=ν xi=ξ pi=π varpi=ϖ rho=ρ varrho=ϱ sigma=σ varsigma=ς tau=τ upsilon=υ phi=ϕ varphi=φ
  chi=χ psi=ψ omega=ω Gamma=Γ Delta=Δ Theta=Θ Lambda=Λ Xi=Ξ Pi=Π Sigma=Σ Upsilon=Υ Phi=Φ Psi=Ψ Omega=Ω infty=∞
  ell=ℓ hbar=ℏ partial=∂ nabla=∇ emptyset=∅ varnothing=∅ aleph=ℵ Re=ℜ Im=ℑ ldots=… dots=… cdots=⋯ vdots=⋮ ddots=⋱
  angle=∠ degree=° top=⊤ bot=⊥`);
const OPERATORS = words(`times=× cdot=⋅ div=÷ pm=± mp=∓ ast=∗ star=⋆ circ=∘ bullet=∙ oplus=⊕ ominus=⊖ otimes=⊗
  odot=⊙ le=≤ leq=≤ ge=≥ geq=≥ ne=≠ neq=≠ approx=≈ equiv=≡ sim=∼ simeq=≃ cong=≅ propto=∝ ll=≪ gg=≫ in=∈ notin=∉
  ni=∋ subset=⊂ subseteq=⊆ supset=⊃ supseteq=⊇ cup=∪ cap=∩ setminus=∖ wedge=∧ land=∧ vee=∨ lor=∨ neg=¬ lnot=¬
  forall=∀ exists=∃ nexists=∄ to=→ rightarrow=→ leftarrow=← leftrightarrow=↔ Rightarrow=⇒ Leftarrow=⇐
  Leftrightarrow=⇔ implies=⟹ iff=⟺ mapsto=↦ longrightarrow=⟶ uparrow=↑ downarrow=↓ mid=∣ parallel=∥ perp=⟂
  therefore=∴ because=∵ vdash=⊢ models=⊨ prime=′ langle=⟨ rangle=⟩ lfloor=⌊ rfloor=⌋ lceil=⌈ rceil=⌉ lvert=|
  rvert=| vert=| lVert=‖ rVert=‖ Vert=‖ lbrace={ rbrace=} lbrack=[ rbrack=] colon=: |=‖ {={ }=} triangle=△ square=□`);
const LARGE = words("sum=∑ prod=∏ coprod=∐ bigcup=⋃ bigcap=⋂ bigoplus=⨁ bigotimes=⨂ bigvee=⋁ bigwedge=⋀");
const INTEGRALS = words("int=∫ iint=∬ iiint=∭ oint=∮");
const FUNCTIONS = new Set(`sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh exp log ln lg det dim ker deg gcd
  arg hom Pr`.split(/\s+/));
const LIMITS = new Set("lim limsup liminf max min sup inf argmax argmin".split(" "));
const ACCENTS = words("hat=^ widehat=^ bar=¯ overline=¯ vec=→ overrightarrow=→ dot=˙ ddot=¨ tilde=~ widetilde=~");
const STYLES = words(`mathbf=bold boldsymbol=bold bm=bold mathbb=double-struck mathcal=script mathscr=script
  mathfrak=fraktur`);
/// What stretches over or under an argument; what is written behind it as a script stands beyond it.
const BRACES = words(`underbrace=⏟ overbrace=⏞ underbracket=⎵ overbracket=⎴`);
const ARROWS = words(`xrightarrow=→ xleftarrow=← xleftrightarrow=↔ xRightarrow=⇒ xLeftarrow=⇐ xmapsto=↦
  xrightleftharpoons=⇌ xlongequal==`);
const UPRIGHT = new Set("text textrm textbf textit mathrm operatorname mathsf mathtt mbox".split(" "));
const GAPS = { ",": ".17em", ":": ".22em", ">": ".22em", ";": ".28em", "!": "-.17em", " ": ".33em", quad: "1em", qquad: "2em" };
const FENCES = { pmatrix: "()", bmatrix: "[]", Bmatrix: "{}", vmatrix: "||", Vmatrix: "‖‖", cases: ["{", ""] };
const SILENT = new Set("displaystyle textstyle limits nolimits big Big bigg Bigg bigl bigr Bigl Bigr nonumber".split(" "));

/// First letters of the mathematical alphabets.
const ALPHABETS = { bold: [0x1d400, 0x1d41a], "double-struck": [0x1d538, 0x1d552], script: [0x1d49c, 0x1d4b6], fraktur: [0x1d504, 0x1d51e] };
/// Letters that Unicode had before it had their alphabets.
const ELSEWHERE = {
  "double-struck": words("C=ℂ H=ℍ N=ℕ P=ℙ Q=ℚ R=ℝ Z=ℤ"),
  script: words("B=ℬ E=ℰ F=ℱ H=ℋ I=ℐ L=ℒ M=ℳ R=ℛ e=ℯ g=ℊ o=ℴ"),
  fraktur: words("C=ℭ H=ℌ I=ℑ R=ℜ Z=ℨ"),
  bold: {},
};

function styled(text, style) {
  const letter = (c) => {
    const at = /[A-Z]/.test(c) ? 0 : /[a-z]/.test(c) ? 1 : -1;
    if (at < 0) return c;
    return ELSEWHERE[style][c] ?? String.fromCodePoint(ALPHABETS[style][at] + c.charCodeAt(0) - "Aa".charCodeAt(at));
  };
  return [...text].map(letter).join("");
}

function el(name, attributes, ...children) {
  const made = document.createElementNS(SPACE, name);
  for (const [key, value] of Object.entries(attributes ?? {})) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

class Parser {
  constructor(source, display) {
    this.tokens = source.match(/\\[a-zA-Z]+\*?|\\[\s\S]|\d+(?:\.\d+)?|\s+|[\s\S]/g) ?? [];
    this.at = 0;
    this.display = display;
    this.depth = 0;
  }

  peek() {
    while (/^\s/.test(this.tokens[this.at] ?? "")) this.at++;
    return this.tokens[this.at];
  }

  next() {
    const token = this.peek();
    this.at++;
    return token;
  }

  expect(token) {
    if (this.next() !== token) throw new Error(`expected ${token}`);
  }

  /// The source between braces, as it stands.
  raw() {
    this.expect("{");
    let text = "";
    for (let depth = 1; ; ) {
      const token = this.tokens[this.at++];
      if (token === undefined) throw new Error("expected }");
      depth += token === "{" ? 1 : token === "}" ? -1 : 0;
      if (!depth) return text;
      text += token;
    }
  }

  /// One argument: a group or a single atom.
  argument() {
    if (this.peek() !== "{") return this.atom();
    this.next();
    const row = this.row((t) => t === "}");
    this.expect("}");
    return row;
  }

  row(ends) {
    if (++this.depth > DEEPEST) throw new Error("too deep");
    const row = el("mrow");
    for (let token = this.peek(); token !== undefined && !ends(token); token = this.peek()) row.append(this.scripted());
    this.depth--;
    return row;
  }

  /// An atom with what stands below and above it.
  scripted() {
    const large = /^\\([a-zA-Z]+)/.exec(this.peek());
    const braced = large && BRACES[large[1]];
    const stacked = braced || (this.display && large && (LARGE[large[1]] || LIMITS.has(large[1])));
    const base = this.peek() === "^" || this.peek() === "_" ? el("mrow") : this.atom();
    let [below, above] = [null, null];
    for (;;) {
      const token = this.peek();
      if (token === "_" && !below) {
        this.next();
        below = this.argument();
      } else if (token === "^" && !above) {
        this.next();
        above = this.argument();
      } else if (token === "'" && !above) {
        let marks = "";
        while (this.peek() === "'") marks += (this.next(), "′");
        above = el("mo", {}, marks);
      } else {
        break;
      }
    }
    const [sub, sup, both] = stacked ? ["munder", "mover", "munderover"] : ["msub", "msup", "msubsup"];
    if (below && above) return el(both, {}, base, below, above);
    if (below) return el(sub, {}, base, below);
    return above ? el(sup, {}, base, above) : base;
  }

  atom() {
    if (++this.depth > DEEPEST) throw new Error("too deep");
    const made = this.single();
    this.depth--;
    return made;
  }

  single() {
    const token = this.next();
    if (token === undefined || token === "}") throw new Error("expected an argument");
    if (token === "{") {
      this.at--;
      return this.argument();
    }
    if (/^\d/.test(token)) return el("mn", {}, token);
    if (/^\p{L}/u.test(token)) return el("mi", {}, token);
    if (token === "~") return el("mspace", { width: ".33em" });
    if (token[0] !== "\\") return el("mo", { stretchy: "false" }, token === "-" ? "−" : token);
    return this.command(token.slice(1));
  }

  command(name) {
    if (LETTERS[name]) return el("mi", {}, LETTERS[name]);
    if (LARGE[name] || INTEGRALS[name]) return el("mo", {}, LARGE[name] ?? INTEGRALS[name]);
    if (OPERATORS[name]) return el("mo", { stretchy: "false" }, OPERATORS[name]);
    if (FUNCTIONS.has(name) || LIMITS.has(name)) return el("mi", { mathvariant: "normal" }, name);
    if (GAPS[name]) return el("mspace", { width: GAPS[name] });
    if (SILENT.has(name)) return el("mrow");
    if (UPRIGHT.has(name.replace("*", ""))) return el("mtext", {}, this.raw().replace(/^ | $/g, "\u00a0"));
    if (STYLES[name]) return this.styled(STYLES[name]);
    if (ACCENTS[name]) return el("mover", { accent: "true" }, this.argument(), el("mo", {}, ACCENTS[name]));
    if (name === "underline") return el("munder", {}, this.argument(), el("mo", {}, "_"));
    if (/^[dtc]?frac$/.test(name)) return el("mfrac", {}, this.argument(), this.argument());
    if (/^[dt]?binom$/.test(name)) {
      const parts = el("mfrac", { linethickness: "0" }, this.argument(), this.argument());
      return el("mrow", {}, el("mo", {}, "("), parts, el("mo", {}, ")"));
    }
    if (name === "sqrt") return this.root();
    if (name === "boxed" || name === "fbox") return el("mrow", { class: "boxed" }, this.argument());
    if (BRACES[name]) {
      const kind = name.startsWith("over") ? "mover" : "munder";
      return el(kind, {}, this.argument(), el("mo", { stretchy: "true" }, BRACES[name]));
    }
    if (ARROWS[name]) return this.arrow(ARROWS[name]);
    if (name === "color" || name === "textcolor") return this.coloured();
    if (name === "ce" || name === "pu") return chemical(this.raw());
    if (name === "tag") return el("mtext", {}, `\u2003(${this.raw()})`);
    if (name === "left") return this.fenced();
    if (name === "begin") return this.environment();
    if (name === "\\") return el("mspace", { linebreak: "newline" });
    if (/^[#$%&_]$/.test(name)) return el("mo", {}, name);
    return el("mtext", {}, `\\${name}`);
  }

  /// Letters of an alphabet; anything else as it is.
  styled(style) {
    const begin = this.at;
    const text = this.peek() === "{" ? this.raw() : this.next();
    if (/^[\w\s]+$/.test(text ?? "")) return el("mi", { mathvariant: "normal" }, styled(text, style));
    this.at = begin;
    return this.argument();
  }

  root() {
    if (this.peek() !== "[") return el("msqrt", {}, this.argument());
    this.next();
    const degree = this.row((t) => t === "]");
    this.expect("]");
    return el("mroot", {}, this.argument(), degree);
  }

  /// An arrow with what stands above it and, in brackets, below it.
  arrow(sign) {
    const arrow = el("mo", { stretchy: "true" }, sign);
    if (this.peek() !== "[") return el("mover", {}, arrow, this.argument());
    this.next();
    const below = this.row((t) => t === "]");
    this.expect("]");
    return el("munderover", {}, arrow, below, this.argument());
  }

  /// A colour, and the argument that has it. One that is no name or number
  /// of a colour is none.
  coloured() {
    const colour = this.raw().trim();
    const known = /^(#[0-9a-f]{3,8}|[a-z]{3,20})$/i.test(colour) ? { mathcolor: colour } : {};
    return el("mstyle", known, this.argument());
  }

  fence() {
    const token = this.next() ?? "";
    if (token === ".") return "";
    return token[0] === "\\" ? (OPERATORS[token.slice(1)] ?? token) : token;
  }

  fenced() {
    const opening = this.fence();
    const row = this.row((t) => t === "\\right");
    this.expect("\\right");
    return surrounded(row, opening, this.fence());
  }

  environment() {
    const name = this.raw().replace("*", "");
    if (name === "array") this.raw();
    const table = el("mtable", /^(align|cases|split|gather)/.test(name) ? { columnalign: "left", class: "left" } : {});
    const ends = (t) => t === "&" || t === "\\\\" || t === "\\end";
    for (let more = true; more; ) {
      const line = el("mtr");
      do line.append(el("mtd", {}, this.row(ends)));
      while (this.next() === "&");
      table.append(line);
      this.at--;
      more = this.next() === "\\\\" && this.peek() !== "\\end";
    }
    if (this.tokens[this.at - 1] !== "\\end") this.expect("\\end");
    this.raw();
    const [opening, closing] = FENCES[name] ?? ["", ""];
    return surrounded(table, opening, closing);
  }
}

/// A chemical formula: numbers behind letters are below, charges above.
function chemical(source) {
  const row = el("mrow");
  const pattern = /([A-Za-z)\]]+)(\d*)(?:\^\{?([\d+-]+)\}?|([+-])(?=\s|$))?|->|<->|<=>|\s+|[\s\S]/g;
  const signs = { "->": "→", "<->": "↔", "<=>": "⇌" };
  for (const [all, letters, count, power, charge] of source.matchAll(pattern)) {
    const above = (power ?? charge)?.replace("-", "−");
    if (signs[all]) row.append(el("mo", {}, signs[all]));
    else if (!letters) row.append(/\d/.test(all) ? el("mn", {}, all) : el("mtext", {}, all.replace(/\s+/, "\u00a0")));
    else {
      const base = el("mi", { mathvariant: "normal" }, letters);
      const below = count ? el("mn", {}, count) : null;
      const over = above ? el("mtext", {}, above) : null;
      if (below && over) row.append(el("msubsup", {}, base, below, over));
      else if (below) row.append(el("msub", {}, base, below));
      else row.append(over ? el("msup", {}, base, over) : base);
    }
  }
  return row;
}

function surrounded(inner, opening, closing) {
  const fence = (text, form) => (text ? [el("mo", { fence: "true", stretchy: "true", form }, text)] : []);
  return el("mrow", {}, ...fence(opening, "prefix"), inner, ...fence(closing, "postfix"));
}

/// A formula; what cannot be read stands there as it was written.
export function math(source, display) {
  try {
    const parser = new Parser(source, display);
    const row = parser.row(() => false);
    return el("math", display ? { display: "block" } : {}, row);
  } catch {
    const code = document.createElement("code");
    code.append(source);
    return code;
  }
}
