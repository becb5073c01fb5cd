//! Reads tool calls in an answer's text.
//!
//! Two forms are supported: the Hermes JSON of Qwen2.5 and Qwen3, `{"name": ..., "arguments": {...}}`, and the XML of
//! Qwen3-Coder and Qwen3.5, `<function=NAME><parameter=KEY>VALUE</parameter></function>`, both between `<tool_call>`
//! and `</tool_call>`. Arguments are passed on as they come, as valid JSON.
//!
//! Models forget a tag now and then. A call is recognized without its opening tag if it names a tool, and ends where
//! something else begins if its closing tag is missing; a block may hold several calls. Tags that no call follows are
//! text: nothing that a model wrote is lost.

use super::arguments::{Arguments, Progress, quoted};
use super::json_call::{CallHead, call, head};
use super::piece::{Piece, join};
use super::signature::{Tools, Types, typed};
use super::tags::{
    self, AFTER_PARAMETER, CLOSES, END_FUNCTION, END_PARAMETER, FENCE, FUNCTIONS, Found, MOST_NAME,
    PARAMETERS, begins_with, behind, behind_marks, call_in, is_begun, named,
};
use nq_runtime::thinking::overlap;
use std::collections::HashSet;

/// How a model writes calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallForm {
    /// `{"name": ..., "arguments": {...}}`.
    Json,
    /// `<function=NAME>` with `<parameter=KEY>` inside.
    Xml,
}

/// Finds calls in text that comes in pieces.
#[derive(Debug, Default)]
pub struct CallParser {
    tools: Tools,
    state: CallState,
    held: String,
    count: usize,
    /// The text so far ends within a line.
    inside_line: bool,
    /// No more text comes.
    last: bool,
    /// A call has ended, and one was all that was allowed.
    over: bool,
}

#[derive(Debug, Default)]
enum CallState {
    /// Outside a call.
    #[default]
    Text,
    /// Behind a call, where its block may end or hold another one.
    Block,
    /// In a JSON call whose name is not known yet. Text that it is if it turns out to be none.
    Head(Lead),
    /// In a JSON call that is read as a whole at its end.
    Whole(Lead, Whole),
    /// In arguments that are JSON.
    Arguments(Arguments),
    /// Behind the arguments, in the call's object.
    Tail,
    /// In the rest of the call's object.
    Rest(Arguments),
    /// In an XML call, between parameters.
    Xml(Xml),
    /// In the value of a parameter.
    Value(Xml, Parameter),
}

/// Text before a JSON call.
#[derive(Clone, Debug, Default)]
struct Lead {
    text: String,
    /// Without an opening tag: only the closing one makes it a call.
    bare: bool,
}

/// How far an object has been read.
#[derive(Clone, Debug, Default)]
struct Whole {
    object: Arguments,
    /// Bytes of the held text.
    read: usize,
    /// Its end, if that has been read.
    end: Option<usize>,
}

/// An XML call.
#[derive(Clone, Debug, Default)]
struct Xml {
    name: String,
    /// The parameters so far.
    parameters: HashSet<String>,
    /// Text in it that is no parameter.
    stray: String,
}

/// A parameter's value.
#[derive(Clone, Debug)]
struct Parameter {
    types: Types,
    /// The places of integers in it.
    integers: HashSet<String>,
    /// Its text so far, if it is converted at its end.
    text: String,
    begun: bool,
    /// True if it is there already: what it was first counts, which has been passed on.
    again: bool,
}

/// Where a value ends.
enum ValueEnd {
    /// After this many bytes; what follows begins after so many.
    At(usize, usize),
    /// Not within this many bytes.
    NotBefore(usize),
}

/// What may follow the end of a call in XML.
const AFTER_FUNCTION: [&str; 4] = [
    CallParser::CLOSE,
    FUNCTIONS[0],
    FUNCTIONS[1],
    CallParser::OPEN,
];

impl CallParser {
    /// The text that begins a call.
    pub(crate) const OPEN: &'static str = tags::OPEN;
    /// The text that ends it.
    pub(crate) const CLOSE: &'static str = tags::CLOSE;

    /// A parser for an answer that may call `tools`.
    pub fn new(tools: Tools) -> Self {
        CallParser {
            tools,
            ..CallParser::default()
        }
    }

    /// Number of calls begun.
    pub fn count(&self) -> usize {
        self.count
    }

    /// True once nothing that follows can be part of the answer: the only call that may be made has ended.
    pub fn is_over(&self) -> bool {
        self.over
    }

    /// True between the beginning of a call and its end.
    pub(super) fn is_inside(&self) -> bool {
        !matches!(self.state, CallState::Text | CallState::Block)
    }

    /// True if a call begins in `text`, which follows [`CallParser::OPEN`]; `None` if that is not certain yet.
    pub(super) fn opens_call(text: &str) -> Option<bool> {
        match call_in(text, false) {
            Found::Unknown => None,
            Found::Nothing => Some(false),
            Found::Json(_) | Found::Xml(..) => Some(true),
        }
    }

    /// Takes more text and appends the pieces that are certain to `out`.
    pub fn push(&mut self, text: &str, out: &mut Vec<Piece>) {
        self.held.push_str(text);
        while !self.over && self.advance(out) {}
    }

    /// Ends the text. `cut`: the model had not ended it, and what is not complete stays so.
    pub fn finish(&mut self, cut: bool, out: &mut Vec<Piece>) {
        self.last = !cut;
        while !self.over && self.advance(out) {}
        let rest = std::mem::take(&mut self.held);
        if self.over {
            return;
        }
        match std::mem::take(&mut self.state) {
            // White space after a call is not part of the text.
            CallState::Text | CallState::Block if self.count > 0 && rest.trim().is_empty() => {}
            // Of a call that was cut off, the tag alone is no text.
            CallState::Text if cut && is_begun(&rest) => {
                let at = rest.find(Self::OPEN).unwrap_or(0);
                self.emit(rest[..at].trim_end(), out);
            }
            CallState::Text | CallState::Block => self.emit(&rest, out),
            CallState::Head(lead) => match head(&rest) {
                CallHead::Open(Some(name)) if cut && !lead.bare => self.start(name, out),
                CallHead::Open(None) if cut && !lead.bare => {}
                _ => self.emit(&(lead.text + &rest), out),
            },
            CallState::Whole(lead, _) => self.whole(lead, &rest, out),
            CallState::Arguments(mut arguments) if !cut => {
                let mut text = String::new();
                arguments.close(&mut text);
                self.more(text, out);
            }
            CallState::Value(mut xml, mut parameter) => {
                // What is held back of a value that was cut off may belong to a tag.
                if !cut {
                    let rest = rest.strip_suffix('\n').unwrap_or(&rest);
                    self.value(&mut parameter, rest, out);
                }
                self.end_value(&parameter, cut, out);
                if !cut {
                    self.end_xml(&mut xml, out);
                }
            }
            CallState::Xml(mut xml) if !cut => {
                xml.stray += &rest;
                self.end_xml(&mut xml, out);
            }
            CallState::Xml(xml) if !xml.stray.is_empty() => self.emit(&xml.stray, out),
            _ => {}
        }
    }

    /// Makes one step; false if more text is needed.
    fn advance(&mut self, out: &mut Vec<Piece>) -> bool {
        match std::mem::take(&mut self.state) {
            CallState::Text => self.text(out),
            CallState::Block => self.block(out),
            CallState::Head(lead) => self.head(lead, out),
            CallState::Whole(lead, whole) => self.object(lead, whole, out),
            CallState::Arguments(arguments) => self.arguments(arguments, out),
            CallState::Tail => self.tail(),
            CallState::Rest(mut arguments) => {
                let progress = arguments.push(&self.held, &mut String::new());
                let (Progress::End(at) | Progress::Broken(at)) = progress else {
                    self.held.clear();
                    self.state = CallState::Rest(arguments);
                    return false;
                };
                self.held.drain(..at);
                self.ended()
            }
            CallState::Xml(xml) => self.xml(xml, out),
            CallState::Value(xml, mut parameter) => {
                match self.end_of_value(&xml, parameter.begun) {
                    ValueEnd::NotBefore(at) => {
                        let text: String = self.held.drain(..at).collect();
                        self.value(&mut parameter, &text, out);
                        self.state = CallState::Value(xml, parameter);
                        false
                    }
                    ValueEnd::At(at, next) => {
                        let text: String = self.held.drain(..next).collect();
                        let value = &text[..at];
                        let value = value.strip_suffix('\n').unwrap_or(value);
                        self.value(&mut parameter, value, out);
                        self.end_value(&parameter, false, out);
                        self.state = CallState::Xml(xml);
                        true
                    }
                }
            }
        }
    }

    /// A call has ended.
    fn ended(&mut self) -> bool {
        self.state = CallState::Block;
        self.over = !self.tools.several;
        !self.over
    }

    /// Passes text on.
    fn emit(&mut self, text: &str, out: &mut Vec<Piece>) {
        if !text.is_empty() {
            self.inside_line = !text.ends_with('\n');
            join(out, Piece::Text(text.to_owned()));
        }
    }

    fn start(&mut self, name: String, out: &mut Vec<Piece>) {
        let index = self.count;
        self.count += 1;
        out.push(Piece::CallStart { index, name });
    }

    /// Adds to the arguments of the last call.
    fn more(&self, text: String, out: &mut Vec<Piece>) {
        if !text.is_empty() {
            let index = self.count - 1;
            join(out, Piece::CallArguments { index, text });
        }
    }

    /// Looks for a call in text.
    fn text(&mut self, out: &mut Vec<Piece>) -> bool {
        let held = &self.held;
        let open = held.find(Self::OPEN).map(|at| (at, Self::OPEN));
        let [function, attribute] = FUNCTIONS.map(|tag| held.find(tag).map(|at| (at, tag)));
        let brace = self.line_with_brace().map(|at| (at, "{"));
        let first = [open, function, attribute, brace]
            .into_iter()
            .flatten()
            .min();
        let tails = [Self::OPEN, FUNCTIONS[0], FUNCTIONS[1]].map(|tag| overlap(held, tag));
        let tail = tails.into_iter().max().unwrap_or(0);
        let at = first.map_or(held.len() - tail, |(at, _)| at);
        // White space before a call is not part of the text; whether a call follows is not known yet.
        let certain = held[..at].trim_end().len();
        let text: String = self.held.drain(..certain).collect();
        self.emit(&text, out);
        let Some((at, tag)) = first.map(|(at, tag)| (at - certain, tag)) else {
            return false;
        };
        let behind = if tag == Self::OPEN {
            at + tag.len()
        } else {
            at
        };
        let found = match (tag, call_in(&self.held[behind..], self.last)) {
            ("{", _) => self.bare(at),
            (tag, Found::Xml(name, _))
                if FUNCTIONS.contains(&tag) && self.tools.schema(&name).is_none() =>
            {
                Found::Nothing
            }
            (_, found) => found,
        };
        match found {
            Found::Unknown => return false,
            Found::Nothing => {
                let text: String = self.held.drain(..at + tag.len()).collect();
                self.emit(&text, out);
            }
            Found::Json(object) => {
                let text: String = self.held.drain(..behind + object).collect();
                let bare = tag == "{";
                self.state = CallState::Head(Lead { text, bare });
            }
            Found::Xml(name, end) => {
                self.held.drain(..behind + end);
                self.begin_xml(name, out);
            }
        }
        true
    }

    /// The first line that begins with a brace.
    fn line_with_brace(&self) -> Option<usize> {
        let at = |(at, _): (usize, &str)| {
            let line = &self.held[..at];
            let before = line.trim_end_matches([' ', '\t']);
            let begins = before.ends_with('\n') || before.is_empty() && !self.inside_line;
            begins.then_some(at)
        };
        self.held.match_indices('{').find_map(at)
    }

    /// A JSON object at the beginning of a line, without an opening tag.
    fn bare(&self, at: usize) -> Found {
        match head(&self.held[at..]) {
            CallHead::Open(_) if !self.last => Found::Unknown,
            CallHead::Named(name, _) if self.tools.schema(&name).is_some() => Found::Json(0),
            _ => Found::Nothing,
        }
    }

    /// Behind a call: the end of the block, another call in it, or text.
    fn block(&mut self, out: &mut Vec<Piece>) -> bool {
        let rest = behind_marks(&self.held);
        let at = self.held.len() - rest.len();
        let close = CLOSES.iter().find(|close| rest.starts_with(**close));
        if let Some(close) = close {
            self.held.drain(..at + close.len());
            self.state = CallState::Block;
            return true;
        }
        if rest.starts_with('{') {
            let text: String = self.held.drain(..at).collect();
            self.state = CallState::Head(Lead { text, bare: false });
            return true;
        }
        let may_be = [&CLOSES[..], &[FENCE]].concat();
        if begins_with(rest, &may_be, self.last).is_none() {
            self.state = CallState::Block;
            return false;
        }
        if self.last && rest.is_empty() {
            self.held.clear();
            return false;
        }
        self.text(out)
    }

    fn head(&mut self, lead: Lead, out: &mut Vec<Piece>) -> bool {
        match head(&self.held) {
            CallHead::Named(name, at) if !lead.bare => {
                let arguments = Arguments::with_integers(self.tools.integers(&name));
                self.start(name, out);
                self.held.drain(..at);
                self.state = CallState::Arguments(arguments);
                true
            }
            CallHead::Open(_) => {
                self.state = CallState::Head(lead);
                false
            }
            _ => {
                self.state = CallState::Whole(lead, Whole::default());
                true
            }
        }
    }

    /// In an object that is read as a whole.
    fn object(&mut self, lead: Lead, mut whole: Whole, out: &mut Vec<Piece>) -> bool {
        let end = match whole.end {
            Some(end) => end,
            None => {
                let new = &self.held[whole.read..];
                match whole.object.push(new, &mut String::new()) {
                    Progress::More => {
                        whole.read = self.held.len();
                        self.state = CallState::Whole(lead, whole);
                        return false;
                    }
                    Progress::End(at) => whole.read + at,
                    Progress::Broken(at) => {
                        let text: String = self.held.drain(..whole.read + at).collect();
                        self.emit(&(lead.text + &text), out);
                        return true;
                    }
                }
            }
        };
        let closes = !lead.bare || {
            match begins_with(self.held[end..].trim_start(), &CLOSES, self.last) {
                Some(closes) => closes,
                None => {
                    whole.end = Some(end);
                    self.state = CallState::Whole(lead, whole);
                    return false;
                }
            }
        };
        let text: String = self.held.drain(..end).collect();
        let before = self.count;
        if closes {
            self.whole(lead, &text, out);
        } else {
            self.emit(&(lead.text + &text), out);
        }
        self.count == before || self.ended()
    }

    /// Reads a whole object; one that is no call stays text.
    fn whole(&mut self, lead: Lead, text: &str, out: &mut Vec<Piece>) {
        match call(text, &self.tools) {
            Some((name, arguments)) => {
                self.start(name, out);
                self.more(arguments, out);
            }
            None => self.emit(&(lead.text + text), out),
        }
    }

    fn arguments(&mut self, mut arguments: Arguments, out: &mut Vec<Piece>) -> bool {
        let mut text = String::new();
        let progress = arguments.push(&self.held, &mut text);
        let more = match progress {
            Progress::More => {
                self.held.clear();
                self.state = CallState::Arguments(arguments);
                false
            }
            Progress::End(at) => {
                self.held.drain(..at);
                self.state = CallState::Tail;
                true
            }
            Progress::Broken(at) => {
                self.held.drain(..at);
                arguments.close(&mut text);
                self.state = CallState::Tail;
                true
            }
        };
        self.more(text, out);
        more
    }

    /// Behind the arguments: the rest of the object, if it is not missing.
    fn tail(&mut self) -> bool {
        let rest = self.held.trim_start();
        let at = self.held.len() - rest.len();
        match rest.chars().next() {
            None => {
                self.state = CallState::Tail;
                return false;
            }
            Some('}') => {
                self.held.drain(..=at);
            }
            Some(',') => {
                self.held.drain(..=at);
                let mut rest = Arguments::default();
                rest.push("{", &mut String::new());
                self.state = CallState::Rest(rest);
                return true;
            }
            Some(_) => {}
        }
        self.ended()
    }

    fn begin_xml(&mut self, name: String, out: &mut Vec<Piece>) {
        self.start(name.clone(), out);
        self.state = CallState::Xml(Xml {
            name,
            ..Xml::default()
        });
    }

    /// Between the parameters of an XML call.
    fn xml(&mut self, mut xml: Xml, out: &mut Vec<Piece>) -> bool {
        let rest = self.held.trim_start();
        let at = self.held.len() - rest.len();
        let ends = [Self::OPEN, Self::CLOSE, "</tool_calls>", END_FUNCTION];
        if ends
            .iter()
            .chain(&FUNCTIONS)
            .any(|end| rest.starts_with(end))
        {
            self.held.drain(..at);
            self.end_xml(&mut xml, out);
            return self.ended();
        }
        if rest.starts_with('{') && xml.parameters.is_empty() {
            let arguments = Arguments::with_integers(self.tools.integers(&xml.name));
            self.held.drain(..at);
            self.state = CallState::Arguments(arguments);
            return true;
        }
        if let Some(tag) = behind(rest, &PARAMETERS) {
            if let Some((name, inner)) = named(tag) {
                let begin = if xml.parameters.is_empty() { "{" } else { "," };
                let types = self.tools.types(&xml.name, name);
                let integers = self.tools.integers_in(&xml.name, name);
                let text = format!("{begin}{}:", quoted(name));
                let again = !xml.parameters.insert(name.to_owned());
                let end = self.held.len() - inner.len();
                self.held.drain(..end);
                if !again {
                    self.more(text, out);
                }
                let parameter = Parameter {
                    types,
                    integers,
                    text: String::new(),
                    begun: false,
                    again,
                };
                self.state = CallState::Value(xml, parameter);
                return true;
            }
            if !tag.contains('>') && tag.len() <= MOST_NAME && !self.last {
                self.state = CallState::Xml(xml);
                return false;
            }
        } else if begins_with(rest, &AFTER_PARAMETER, self.last).is_none() {
            self.state = CallState::Xml(xml);
            return false;
        }
        // Neither a parameter nor the end.
        let rest = &self.held[at..];
        let end = match rest.strip_prefix(END_PARAMETER) {
            Some(_) => 0,
            None => {
                let mut tags = rest.match_indices('<').map(|(i, _)| i);
                tags.find(|&i| i > 0).unwrap_or(rest.len())
            }
        };
        xml.stray += &self.held[..at + end];
        let skipped = if end == 0 && !rest.is_empty() {
            END_PARAMETER.len()
        } else {
            end
        };
        self.held.drain(..at + skipped);
        self.state = CallState::Xml(xml);
        skipped > 0
    }

    fn end_xml(&mut self, xml: &mut Xml, out: &mut Vec<Piece>) {
        let end = if xml.parameters.is_empty() { "{}" } else { "}" };
        self.more(end.to_owned(), out);
        let stray = std::mem::take(&mut xml.stray);
        // Braces of a call in JSON are left over at times.
        let says = |c: char| !c.is_whitespace() && !"{}".contains(c);
        if stray.contains(says) {
            self.emit(stray.trim(), out);
        }
    }

    /// More of a value. Strings are passed on as they come.
    fn value(&self, parameter: &mut Parameter, text: &str, out: &mut Vec<Piece>) {
        if text.is_empty() || parameter.again {
            return;
        }
        let text = match parameter.begun {
            true => text,
            false => text.strip_prefix('\n').unwrap_or(text),
        };
        if parameter.types.is_text() {
            let json = quoted(text);
            let end = json.len() - 1;
            let from = usize::from(parameter.begun);
            self.more(json[from..end].to_owned(), out);
        } else {
            parameter.text.push_str(text);
        }
        parameter.begun = true;
    }

    fn end_value(&self, parameter: &Parameter, cut: bool, out: &mut Vec<Piece>) {
        let text = match (parameter.types.is_text(), parameter.begun) {
            _ if parameter.again => return,
            (true, _) if cut => return,
            (true, true) => "\"".to_owned(),
            (true, false) => "\"\"".to_owned(),
            (false, _) if cut && parameter.text.is_empty() => return,
            (false, _) => typed(&parameter.text, parameter.types, &parameter.integers),
        };
        self.more(text, out);
    }

    /// Where the value ends that the held text begins with or goes on. A tag in it counts if what follows it fits, or
    /// if it begins a line; others belong to the value.
    fn end_of_value(&self, xml: &Xml, begun: bool) -> ValueEnd {
        let held = self.held.as_str();
        let before = |at: usize| held[..at].strip_suffix('\n').map_or(at, str::len);
        for (at, _) in held.match_indices('<') {
            let tag = &held[at..];
            let unknown = ValueEnd::NotBefore(before(at));
            let line = at == 0 && !begun || held[..at].ends_with('\n');
            let [parameter, attribute] = PARAMETERS;
            let tags = [
                END_PARAMETER,
                parameter,
                attribute,
                END_FUNCTION,
                CallParser::CLOSE,
            ];
            match begins_with(tag, &tags, self.last) {
                None => return unknown,
                Some(false) => continue,
                Some(true) => {}
            }
            if let Some(name) = behind(tag, &PARAMETERS).filter(|_| line) {
                match named(name) {
                    Some((name, _)) if self.tools.has(&xml.name, name) => {
                        return ValueEnd::At(at, at);
                    }
                    None if !name.contains('>') && name.len() <= MOST_NAME && !self.last => {
                        return unknown;
                    }
                    _ => continue,
                }
            }
            let (after, next): (&str, &[&str]) = match tag.strip_prefix(END_PARAMETER) {
                Some(after) => (after, &AFTER_PARAMETER),
                None if !line => continue,
                None => match tag.strip_prefix(END_FUNCTION) {
                    Some(after) => (after, &AFTER_FUNCTION),
                    None => (&tag[CallParser::CLOSE.len()..], &[CallParser::OPEN]),
                },
            };
            // Braces that are left over say nothing.
            let after = after.trim_start_matches(|c: char| c.is_whitespace() || c == '}');
            match begins_with(after, next, self.last) {
                None => return unknown,
                Some(false) if !(self.last && after.is_empty()) => {}
                _ if tag.starts_with(END_PARAMETER) => {
                    return ValueEnd::At(at, at + END_PARAMETER.len());
                }
                _ => return ValueEnd::At(at, at),
            }
        }
        ValueEnd::NotBefore(before(held.len()))
    }
}

#[cfg(test)]
mod tests;
