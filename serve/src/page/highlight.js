// Colours for code: comments, texts, numbers and the words that most languages share.

const WORDS = new Set(`abstract and as assert async await begin bool boolean break case catch char class const continue
  crate def default defer del delete do done double elif else elsif end enum esac except export extends extern false False
  fi final finally float fn for foreach from func function global go goto if impl implements import in include inline
  instanceof int interface is lambda let long loop match mod module mut namespace new nil None nonlocal not null
  nullptr or package pass private protected pub public raise range ref require return select self Self short signed
  sizeof static str string String struct super switch template then this throw throws trait true True try type typedef
  typeof union unless unsafe unsigned until use using var virtual void when where while with yield
  SELECT FROM WHERE INSERT INTO VALUES UPDATE SET DELETE CREATE TABLE JOIN LEFT RIGHT INNER ON GROUP BY ORDER HAVING
  LIMIT AND OR NOT NULL AS`.split(/\s+/));

const HASH = /^(py|python|sh|bash|zsh|shell|console|rb|ruby|perl|r|yaml|yml|toml|ini|make|makefile|dockerfile|julia|elixir)$/;
const DASHES = /^(sql|lua|haskell|hs|ada)$/;
const NONE = /^(text|txt|plain|plaintext|output|log|csv)$/;

const STRINGS = String.raw`"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'|` + "`(?:[^`\\\\]|\\\\[\\s\\S])*`";
const REST = String.raw`\b(?:0[xX][\da-fA-F_]+|\d[\d_]*(?:\.\d+)?(?:[eE][+-]?\d+)?)\w*|[A-Za-z_$][\w$]*`;

function pattern(language) {
  let comments = String.raw`\/\/[^\n]*|\/\*[\s\S]*?(?:\*\/|$)`;
  if (HASH.test(language)) comments = String.raw`#[^\n]*|"""[\s\S]*?(?:"""|$)|'''[\s\S]*?(?:'''|$)`;
  else if (DASHES.test(language)) comments = String.raw`--[^\n]*|\/\*[\s\S]*?(?:\*\/|$)`;
  else if (/^(html|xml|svg|markdown|md)$/.test(language)) comments = String.raw`<!--[\s\S]*?(?:-->|$)`;
  return new RegExp(`(${comments})|(${STRINGS})|(${REST})`, "g");
}

/// The parts of a code as elements and texts.
export function highlighted(text, language) {
  const name = language.toLowerCase();
  if (!name || NONE.test(name)) return [text];
  const out = [];
  let at = 0;
  for (const found of text.matchAll(pattern(name))) {
    const [all, comment, string] = found;
    const kind = comment ? "comment" : string ? "string" : /^\d/.test(all) ? "number" : WORDS.has(all) ? "word" : "";
    if (!kind) continue;
    if (found.index > at) out.push(text.slice(at, found.index));
    const part = document.createElement("span");
    part.className = kind;
    part.append(all);
    out.push(part);
    at = found.index + all.length;
  }
  out.push(text.slice(at));
  return out;
}
