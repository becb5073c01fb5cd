//! Answers that conform to a JSON schema or a grammar: llguidance finds the tokens that may follow.
//!
//! Its Earley parser walks the tokens' bytes, so an answer is valid whatever the sampling, as long
//! as it is not cut off. Thinking is free: a constraint begins after it.

mod bounds;
mod calls;
mod disjoint;
mod patterns;
mod schema;

use crate::hold::Constraint;
use crate::output::{CallForm, CallParser};
use calls::Writing;
use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::{ApproximateTokEnv, SimpleVob, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory};
use nq_runtime::Tokenizer;
pub use schema::unenforced;
use schema::{MOST_BYTES, compact, prepared};
use serde_json::{Value, json};
use std::fmt;
use std::sync::Arc;

/// Bytes of one regular expression, at most; of several, the sum of their squares counts, as their compilation takes
/// time that grows with the square of their length.
const MOST_PATTERN: usize = 8 << 10;

/// Tokens that are markup though their tokenizer marks them as text: a JSON string must not hold
/// them.
const MARKUP: [&str; 6] = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
];

/// The format of an answer.
#[derive(Clone, Debug, PartialEq)]
pub enum Format {
    /// A JSON object.
    Object,
    /// JSON of this schema.
    Schema(Value),
    /// A text that this regular expression matches as a whole.
    Regex(String),
    /// A text of this Lark grammar, whose first rule is `start`.
    Lark(String),
    /// One or more tool calls in the model's form.
    Calls {
        /// Tools that may be called, and schemas of their arguments.
        tools: Vec<(String, Value)>,
        /// True if several calls may be made.
        several: bool,
    },
    /// Calls of tools, or an answer of a format of JSON. The calls are those that the model may make unasked: their
    /// arguments are any.
    CallsOr {
        /// Tools that may be called, and schemas of their arguments.
        tools: Vec<(String, Value)>,
        /// True if several calls may be made.
        several: bool,
        /// The format of an answer that is no call: [`Format::Object`] or [`Format::Schema`].
        answer: Box<Format>,
    },
}

/// Where an answer stands when a constraint on it begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// In the midst of thinking that the prompt began.
    Thinking,
    /// Where the model may begin to think.
    MayThink,
    /// Behind any thinking.
    Answer,
}

/// Compiles formats for one vocabulary.
pub struct Grammars {
    factory: ParserFactory,
    words: usize,
    writing: Writing,
    think: Option<(u32, u32)>,
    /// Tokens of white space alone.
    blank: Vec<u32>,
    /// All tokens but those that end an answer.
    unended: Vec<u32>,
}

impl fmt::Debug for Grammars {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Grammars").finish_non_exhaustive()
    }
}

impl Grammars {
    /// For a model with `vocab` tokens, of which `stop` end an answer, that writes calls in `form`.
    ///
    /// # Errors
    /// If no token ends an answer, or one is past the vocabulary.
    pub(crate) fn new(
        tokenizer: &Tokenizer,
        vocab: usize,
        stop: &[u32],
        form: CallForm,
    ) -> Result<Self, String> {
        if stop.is_empty() || stop.iter().any(|&t| t as usize >= vocab) {
            return Err(format!(
                "expected a token below {vocab} that ends an answer, found {stop:?}"
            ));
        }
        let bytes = tokenizer.token_bytes();
        let markup: Vec<u32> = MARKUP
            .iter()
            .filter_map(|t| tokenizer.token_id(t))
            .collect();
        let word = |id: u32| {
            let word = bytes.get(id);
            match bytes.is_special(id) || markup.contains(&id) {
                true => [&[TokTrie::SPECIAL_TOKEN_MARKER], word].concat(),
                // Alone, this byte is no text.
                false if word.first() == Some(&TokTrie::SPECIAL_TOKEN_MARKER) => Vec::new(),
                false => word.to_vec(),
            }
        };
        let words: Vec<Vec<u8>> = (0..vocab as u32).map(word).collect();
        let info = TokRxInfo::new(vocab as u32, stop[0]);
        let trie = TokTrie::from(&info, &words).with_eos_tokens(stop);
        let env: Arc<ApproximateTokEnv> = Arc::new(ApproximateTokEnv::new(trie));
        let env: llguidance::toktrie::TokEnv = env;
        let mut factory = ParserFactory::new_simple(&env).map_err(|e| e.to_string())?;
        factory.quiet();
        let limits = factory.limits_mut();
        limits.verbose_errors = false;
        limits.initial_lexer_fuel = 2_000_000;
        let is_blank = |id: &u32| {
            let word = bytes.get(*id);
            !word.is_empty() && word.iter().all(u8::is_ascii_whitespace)
        };
        let count = vocab.div_ceil(32);
        let mut unended = vec![u32::MAX; count];
        if !vocab.is_multiple_of(32) {
            unended[count - 1] = (1 << (vocab % 32)) - 1;
        }
        for &id in stop {
            set(&mut unended, id, false);
        }
        Ok(Grammars {
            factory,
            words: count,
            writing: Writing {
                form,
                tokens: [CallParser::OPEN, CallParser::CLOSE]
                    .iter()
                    .all(|tag| tokenizer.token_id(tag).is_some()),
            },
            think: tokenizer
                .token_id("<think>")
                .zip(tokenizer.token_id("</think>")),
            blank: (0..vocab as u32).filter(is_blank).collect(),
            unended,
        })
    }

    /// A constraint that holds an answer to `format`.
    ///
    /// # Errors
    /// The part of the format that cannot be served, and why.
    pub fn compile(&self, format: &Format, start: Start) -> Result<Conformant, String> {
        affordable(format)?;
        let grammar = self.grammar(format)?;
        let matcher = Matcher::new(self.factory.create_parser(grammar));
        if let Some(why) = matcher.get_error() {
            return Err(reason(&why));
        }
        let state = match (start, self.think) {
            (Start::Thinking, Some((_, end))) => GrammarState::Thinking(end),
            (Start::MayThink, Some((begin, end))) => GrammarState::MayThink(begin, end),
            _ => GrammarState::Answer,
        };
        Ok(Conformant {
            matcher,
            state,
            words: self.words,
            mask: Vec::new(),
            blank: self.blank.clone().into(),
            unended: self.unended.clone().into(),
        })
    }

    fn grammar(&self, format: &Format) -> Result<TopLevelGrammar, String> {
        match format {
            Format::Object | Format::Schema(_) => {
                Ok(TopLevelGrammar::from_json_schema(json(format)?))
            }
            Format::Regex(text) | Format::Lark(text) if text.len() > MOST_BYTES => Err(format!(
                "expected at most {MOST_BYTES} bytes, found {}",
                text.len()
            )),
            Format::Regex(text) => Ok(TopLevelGrammar::from_regex(text)),
            Format::Lark(text) => Ok(TopLevelGrammar::from_lark(text.clone())),
            Format::Calls { tools, several } => {
                let lark = calls::lark(self.writing, tools, *several, None)?;
                Ok(TopLevelGrammar::from_lark(lark))
            }
            Format::CallsOr {
                tools,
                several,
                answer,
            } => {
                let lark = calls::lark(self.writing, tools, *several, Some(&json(answer)?))?;
                Ok(TopLevelGrammar::from_lark(lark))
            }
        }
    }
}

/// What the engine takes for an end that looks ahead: it fails on one within a text when it is asked for tokens.
const LOOKS_AHEAD: &str = "(?P<stop>";

/// Refuses regular expressions that would take long to compile, or that would fail once there are tokens. A line of a
/// Lark grammar counts as one.
fn affordable(format: &Format) -> Result<(), String> {
    fn within<'a>(schema: &'a Value, patterns: &mut Vec<&'a str>) {
        match schema {
            Value::Array(items) => items.iter().for_each(|item| within(item, patterns)),
            Value::Object(map) => {
                for (key, value) in map {
                    match (key.as_str(), value) {
                        ("pattern", Value::String(pattern)) => patterns.push(pattern),
                        ("patternProperties", Value::Object(named)) => {
                            patterns.extend(named.keys().map(String::as_str));
                        }
                        _ => {}
                    }
                    within(value, patterns);
                }
            }
            _ => {}
        }
    }
    let mut patterns: Vec<&str> = Vec::new();
    match format {
        Format::Object => {}
        Format::Regex(pattern) => patterns.push(pattern),
        Format::Lark(text) => patterns.extend(text.lines()),
        Format::Schema(schema) => within(schema, &mut patterns),
        Format::Calls { tools, .. } | Format::CallsOr { tools, .. } => {
            tools
                .iter()
                .for_each(|(_, schema)| within(schema, &mut patterns));
        }
    }
    let ahead = patterns.iter().find(|p| p.contains(LOOKS_AHEAD));
    if let Some(pattern) = ahead.filter(|_| !matches!(format, Format::Lark(_))) {
        return Err(format!(
            "pattern {pattern}: look-around, including look-ahead, is not supported"
        ));
    }
    let lengths: Vec<usize> = patterns.iter().map(|p| p.len()).collect();
    if let Format::CallsOr { answer, .. } = format {
        affordable(answer)?;
    }
    let squares = lengths.iter().map(|n| n.saturating_mul(*n)).sum::<usize>();
    match squares > MOST_PATTERN * MOST_PATTERN {
        true => Err(format!(
            "expected at most {MOST_PATTERN} bytes of a regular expression or a line of a grammar, found {} in {} of \
             them",
            lengths.iter().sum::<usize>(),
            lengths.len()
        )),
        false => Ok(()),
    }
}

/// What is wrong, in one line.
fn reason(why: &str) -> String {
    let mut lines = why.lines().map(str::trim);
    let line = lines.next().unwrap_or_default();
    if let Some((before, _)) = line.split_once("regex parse error:") {
        // The pattern, a line that points into it, and the reason.
        let pattern = lines.next().unwrap_or_default();
        let reason = lines
            .find_map(|l| l.strip_prefix("error: "))
            .unwrap_or("invalid");
        return format!("{before}pattern {pattern}: {reason}");
    }
    match line.contains("'coerce_one_of'") {
        // The author of the schema must know where to set this option.
        true => format!("{line}: \"x-guidance\": {{\"coerce_one_of\": true}} in the schema"),
        false => line.to_owned(),
    }
}

fn set(mask: &mut [u32], id: u32, to: bool) {
    let bit = 1 << (id % 32);
    if let Some(word) = mask.get_mut(id as usize / 32) {
        *word = if to { *word | bit } else { *word & !bit };
    }
}

/// The schema of a format of JSON.
fn json(format: &Format) -> Result<Value, String> {
    match format {
        Format::Schema(schema) => prepared(schema, " ?"),
        _ => compact(json!({"type": "object"}), " ?"),
    }
}

/// Where an answer is.
#[derive(Clone, Copy, Debug)]
enum GrammarState {
    /// Thinking, up to this token.
    Thinking(u32),
    /// At a beginning where the first of these tokens begins thinking and the second ends it.
    MayThink(u32, u32),
    /// Directly after thinking, where templates put line ends.
    Gap,
    Answer,
}

/// A constraint on one answer.
#[derive(Clone)]
pub struct Conformant {
    matcher: Matcher,
    state: GrammarState,
    words: usize,
    mask: Vec<u32>,
    blank: Arc<[u32]>,
    unended: Arc<[u32]>,
}

impl fmt::Debug for Conformant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Conformant")
            .field("state", &self.state)
            .finish_non_exhaustive()
    }
}

impl Constraint for Conformant {
    fn mask(&mut self) -> Result<Option<&[u32]>, String> {
        if let GrammarState::Thinking(_) = self.state {
            return Ok(Some(&self.unended));
        }
        let allowed: SimpleVob = self
            .matcher
            .compute_mask_or_eos()
            .map_err(|e| reason(&e.to_string()))?;
        self.mask.clear();
        self.mask.extend_from_slice(allowed.as_slice());
        self.mask.resize(self.words, 0);
        match self.state {
            GrammarState::MayThink(begin, _) => set(&mut self.mask, begin, true),
            GrammarState::Gap => self
                .blank
                .iter()
                .for_each(|&id| set(&mut self.mask, id, true)),
            _ => {}
        }
        Ok(Some(&self.mask))
    }

    fn accept(&mut self, token: u32) -> Result<(), String> {
        match self.state {
            GrammarState::Thinking(end) => {
                if token == end {
                    self.state = GrammarState::Gap;
                }
                return Ok(());
            }
            GrammarState::MayThink(begin, end) if token == begin => {
                self.state = GrammarState::Thinking(end);
                return Ok(());
            }
            GrammarState::Gap if self.blank.binary_search(&token).is_ok() => {
                let taken = self.matcher.validate_tokens(&[token]);
                if !taken.is_ok_and(|n| n == 1) {
                    self.state = GrammarState::Answer;
                    return Ok(());
                }
            }
            _ => {}
        }
        self.state = GrammarState::Answer;
        self.matcher
            .consume_token(token)
            .map_err(|e| reason(&e.to_string()))
    }
}
