//! Text to token ids and back, as defined by `tokenizer.json`.
//!
//! The `tokenizers` crate does the encoding; this module adds what running a model needs
//! around it: parallel encoding of long texts that gives the same ids, checks against the
//! model's vocabulary, and a table of each token's bytes, used for decoding (here) and streaming
//! ([`crate::Detokenizer`]).

pub(crate) mod control;
mod cut;
mod outline;

pub use control::ControlTokens;

use crate::chat_template::prompt::RenderedChat;
use crate::error::{Error, Result};
use nq_formats::Files;
use nq_formats::tokenizer::{Around, around};
use rayon::prelude::*;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

/// The file that holds a tokenizer.
pub const TOKENIZER_FILE: &str = "tokenizer.json";

/// Largest id accepted: tables are indexed by id.
const MAX_ID: u32 = 1 << 24;

/// Bytes of text per parallel piece.
const PIECE_BYTES: usize = 16 << 10;

/// Pieces that are encoded together: so many hold memory at a time, before they are tokens.
const PIECES: usize = 16;

/// Most bytes of a piece of a text of bounded length. A longer one has no place to cut it for a megabyte: no
/// blank behind a word, no line.
const MOST_PIECE: usize = 1 << 20;

/// A normal form makes a text shorter by at most this factor: three characters of Korean become one as long as
/// each.
const MOST_COMPOSED: usize = 3;

/// A token longer than this is not counted on when a text's length is compared with tokens.
const MOST_TOKEN: usize = 1024;

/// A byte-level BPE tokenizer.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    path: PathBuf,
    bytes: Arc<TokenBytes>,
    /// True if texts may be cut at [`cut::next_boundary`] and encoded in pieces.
    cuttable: bool,
    /// Most bytes of text that become one token.
    longest: usize,
    control: ControlTokens,
    around: Around,
    /// The same tokenizer without special tokens; made when first needed.
    literal: OnceLock<Box<tokenizers::Tokenizer>>,
}

impl Tokenizer {
    /// Reads `tokenizer.json`, with the flags of added tokens that `tokenizer_config.json` has.
    ///
    /// # Errors
    /// Errors of [`nq_formats::tokenizer::applied`]; [`Error::Text`] if it does not hold a
    /// byte-level BPE tokenizer, or if it has parts that nq does not support, naming them.
    pub fn from_files(files: &Files) -> Result<Self> {
        let json = nq_formats::tokenizer::applied(files)?;
        let path = files.path(TOKENIZER_FILE);
        let bad = |why: String| Error::Text {
            path: path.clone(),
            what: "tokenizer",
            why,
        };
        outline::check(&json).map_err(bad)?;
        let around = around(&path, &json)?;
        // Not `from_bytes`, a generic function: all of the crate's parsing would be compiled again here.
        let read = guarded(|| std::str::from_utf8(&json)?.parse::<tokenizers::Tokenizer>());
        let mut inner = read.map_err(bad)?;
        // Files saved after training may carry length limits of the training run; obeying them would
        // drop text silently.
        inner
            .with_truncation(None)
            .map_err(|e| bad(e.to_string()))?
            .with_padding(None)
            .with_post_processor(None::<tokenizers::PostProcessorWrapper>);
        let bytes = TokenBytes::new(&inner).map_err(bad)?;
        let added = inner.get_added_tokens_decoder();
        let control = added
            .values()
            .filter(|t| t.special && !t.content.is_empty());
        let control = control.map(|t| t.content.clone()).collect();
        let control = ControlTokens::new(control).map_err(bad)?;
        let composed = inner.get_normalizer().map_or(1, |_| MOST_COMPOSED);
        Ok(Tokenizer {
            cuttable: cut::is_cuttable(&inner),
            longest: bytes.longest().clamp(1, MOST_TOKEN) * composed,
            control,
            around,
            literal: OnceLock::new(),
            bytes: Arc::new(bytes),
            inner,
            path,
        })
    }

    /// The ids of `text`. Special tokens written in the text (`<|im_end|>`) become their ids;
    /// none are added around it.
    ///
    /// # Errors
    /// [`Error::Text`] if the pre-tokenizer's pattern fails on this text.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        self.encode_pieces(&self.inner, text, usize::MAX)
    }

    /// Like [`Tokenizer::encode`], for a text whose length nobody has bounded yet: time and memory depend on `most`
    /// and not on the text.
    ///
    /// # Errors
    /// [`Error::TooLong`] if it has more than `most` tokens; errors of [`Tokenizer::encode`].
    pub fn encode_within(&self, text: &str, most: usize) -> Result<Vec<u32>> {
        self.encode_pieces(&self.inner, text, most)
    }

    /// The tokens that the tokenizer adds around a text that stands alone, such as the begin token of Llama 3.
    pub fn around(&self) -> &Around {
        &self.around
    }

    /// The ids of a text that stands alone: like [`Tokenizer::encode`], with the tokens that the tokenizer adds around it.
    /// Prompts of chats have what their template writes instead.
    pub fn encode_whole(&self, text: &str) -> Result<Vec<u32>> {
        self.encode_whole_within(text, usize::MAX)
    }

    /// Like [`Tokenizer::encode_whole`], for a text whose length nobody has bounded yet.
    pub fn encode_whole_within(&self, text: &str, most: usize) -> Result<Vec<u32>> {
        let Around { before, after } = &self.around;
        let tokens = self.encode_within(text, most)?;
        Ok([before, &tokens, after].map(Vec::as_slice).concat())
    }

    /// Refuses `bytes` of text that have more than `most` tokens however they are divided.
    ///
    /// # Errors
    /// [`Error::TooLong`].
    pub fn check_bytes(&self, bytes: usize, most: usize) -> Result<()> {
        match bytes.div_ceil(self.longest) {
            at_least if at_least > most => Err(Error::TooLong { at_least, most }),
            _ => Ok(()),
        }
    }

    /// The ids of a text of at most `most` tokens, a number of pieces at a time.
    fn encode_pieces(
        &self,
        tokenizer: &tokenizers::Tokenizer,
        text: &str,
        most: usize,
    ) -> Result<Vec<u32>> {
        self.check_bytes(text.len(), most)?;
        let pieces = match self.cuttable {
            true => cut::cut(text, PIECE_BYTES),
            false => vec![text],
        };
        if most < usize::MAX && self.cuttable {
            let mut lengths = pieces.iter().map(|piece| piece.len());
            if let Some(bytes) = lengths.find(|&bytes| bytes > MOST_PIECE) {
                return Err(Error::Request {
                    what: "text",
                    expected: format!("words and lines of at most {MOST_PIECE} bytes"),
                    found: format!("one of {bytes}"),
                });
            }
        }
        let mut ids = Vec::new();
        for pieces in pieces.chunks(PIECES) {
            match pieces {
                [only] => ids.extend(self.encode_with(tokenizer, only)?),
                many => {
                    let encode = |piece: &&str| self.encode_with(tokenizer, piece);
                    let parts: Vec<Vec<u32>> =
                        many.par_iter().map(encode).collect::<Result<_>>()?;
                    parts.iter().for_each(|part| ids.extend_from_slice(part));
                }
            }
            if ids.len() > most {
                let at_least = ids.len();
                return Err(Error::TooLong { at_least, most });
            }
        }
        Ok(ids)
    }

    fn encode_with(&self, tokenizer: &tokenizers::Tokenizer, text: &str) -> Result<Vec<u32>> {
        match guarded(|| tokenizer.encode_fast(text, false)) {
            Ok(encoding) => Ok(encoding.get_ids().to_vec()),
            Err(why) => Err(Error::Text {
                path: self.path.clone(),
                what: "tokenizer",
                why: format!("cannot encode: {why}"),
            }),
        }
    }

    /// Tokens marked special (`<|im_end|>`). [`Tokenizer::encode_prompt`] treats them as control
    /// tokens only where the template wrote them.
    pub fn control_tokens(&self) -> &ControlTokens {
        &self.control
    }

    /// The ids of a chat. Control tokens quoted in messages stay text: `<|im_end|>` in a message is
    /// encoded as its characters, like any word that is not in the vocabulary.
    pub fn encode_prompt(&self, prompt: &RenderedChat) -> Result<Vec<u32>> {
        self.encode_prompt_within(prompt, usize::MAX)
    }

    /// Like [`Tokenizer::encode_prompt`], for a chat whose length nobody has bounded yet.
    pub fn encode_prompt_within(&self, prompt: &RenderedChat, most: usize) -> Result<Vec<u32>> {
        if !prompt.is_marked() {
            return self.encode_within(&prompt.text(), most);
        }
        self.check_bytes(prompt.text().len(), most)?;
        let mut ids = Vec::new();
        for (text, quotes) in prompt.parts(&self.control) {
            ids.extend(match quotes {
                false => self.encode_within(&text, most)?,
                true => self.encode_quoted_within(&text, most)?,
            });
            if ids.len() > most {
                let at_least = ids.len();
                return Err(Error::TooLong { at_least, most });
            }
        }
        Ok(ids)
    }

    /// The ids of an untrusted text: control tokens in it (`<|im_end|>`) are encoded by their characters.
    pub(crate) fn encode_quoted(&self, text: &str) -> Result<Vec<u32>> {
        self.encode_quoted_within(text, usize::MAX)
    }

    /// Like `encode_quoted`, for a text whose length nobody has bounded yet.
    pub fn encode_quoted_within(&self, text: &str, most: usize) -> Result<Vec<u32>> {
        self.encode_pieces(self.literal(), text, most)
    }

    /// The tokenizer that treats control tokens as text.
    fn literal(&self) -> &tokenizers::Tokenizer {
        self.literal.get_or_init(|| {
            let mut literal = self.inner.clone();
            literal.set_encode_special_tokens(true);
            Box::new(literal)
        })
    }

    /// The text of `ids`. Bytes that are not UTF-8 become U+FFFD and ids without a token
    /// become nothing, as Hugging Face's tokenizers do. `skip_special` leaves out tokens
    /// marked special.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> String {
        let mut bytes = Vec::with_capacity(ids.len() * 4);
        for &id in ids {
            if !(skip_special && self.bytes.is_special(id)) {
                bytes.extend_from_slice(self.bytes.get(id));
            }
        }
        match String::from_utf8(bytes) {
            Ok(text) => text,
            Err(e) => String::from_utf8_lossy(e.as_bytes()).into_owned(),
        }
    }

    /// The id of one token, e.g. `<|im_end|>`.
    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// Number of tokens, including special and added ones.
    pub fn vocab_size(&self) -> usize {
        self.bytes.known
    }

    /// The largest id of a token.
    pub fn max_id(&self) -> u32 {
        self.bytes.max_id()
    }

    /// The bytes of each token, shared with detokenizers.
    pub fn token_bytes(&self) -> &Arc<TokenBytes> {
        &self.bytes
    }

    /// Refuses another tokenizer that has another token for an id, or marks others special: what one of
    /// two models says means something else to the other.
    ///
    /// # Errors
    /// [`Error::Text`] that names `other`'s file and the first difference.
    pub fn check_same(&self, other: &Tokenizer) -> Result<()> {
        let (ours, theirs) = (&self.bytes, &other.bytes);
        let named = |tokens: &TokenBytes, id: u32| match (tokens.get(id), tokens.is_special(id)) {
            (b"", _) => "none".to_owned(),
            (bytes, false) => format!("{:?}", String::from_utf8_lossy(bytes)),
            (bytes, true) => format!("special {:?}", String::from_utf8_lossy(bytes)),
        };
        let differs = |id: &u32| {
            ours.get(*id) != theirs.get(*id) || ours.is_special(*id) != theirs.is_special(*id)
        };
        match (0..=ours.max_id().max(theirs.max_id())).find(differs) {
            None => Ok(()),
            Some(id) => Err(Error::Text {
                path: other.path.clone(),
                what: "tokenizer",
                why: format!(
                    "expected the tokens of {}: token {id} is {} there and {} here",
                    self.path.display(),
                    named(ours, id),
                    named(theirs, id)
                ),
            }),
        }
    }

    /// Refuses a model of another vocabulary. A model may have more rows than there are
    /// tokens (they are padded for alignment: Qwen3 has 151,936 for 151,669), not fewer.
    ///
    /// # Errors
    /// [`Error::Text`] if an id has no row in the model, or if a quarter or more of the
    /// model's rows have no token.
    pub fn check_vocab(&self, model_vocab: usize) -> Result<()> {
        let why = if self.max_id() as usize >= model_vocab {
            format!(
                "expected ids below the model's vocabulary of {model_vocab}, found {}",
                self.max_id()
            )
        } else if self.vocab_size() < model_vocab - model_vocab / 4 {
            format!(
                "expected tokens for the model's vocabulary of {model_vocab}, found only {}",
                self.vocab_size()
            )
        } else {
            return Ok(());
        };
        Err(Error::Text {
            path: self.path.clone(),
            what: "tokenizer",
            why: format!("it belongs to another model: {why}"),
        })
    }
}

/// Calls the `tokenizers` crate; panics become errors.
fn guarded<T>(f: impl FnOnce() -> tokenizers::Result<T>) -> Result<T, String> {
    match catch_unwind(AssertUnwindSafe(f)) {
        Ok(result) => result.map_err(|e| e.to_string()),
        Err(_) => Err("the tokenizers crate panicked".into()),
    }
}

/// Tokens that divide an answer into thinking, calls and text.
const STRUCTURE: [&str; 4] = ["<think>", "</think>", "<tool_call>", "</tool_call>"];

/// The bytes of every token, by id.
pub struct TokenBytes {
    /// Token `id` is `data[ends[id - 1]..ends[id]]`.
    ends: Vec<u32>,
    data: Vec<u8>,
    /// Ids of tokens marked special, sorted.
    special: Vec<u32>,
    /// Number of tokens (ids may have gaps).
    known: usize,
}

impl TokenBytes {
    fn new(tokenizer: &tokenizers::Tokenizer) -> Result<Self, String> {
        let vocab = tokenizer.get_vocab(true);
        let max = vocab.values().copied().max().ok_or("it has no tokens")?;
        if max > MAX_ID {
            return Err(format!("expected ids up to {MAX_ID}, found {max}"));
        }
        let mut tokens: Vec<Option<&str>> = vec![None; max as usize + 1];
        for (token, &id) in &vocab {
            tokens[id as usize] = Some(token);
        }
        let chars = char_bytes();
        let mut ends = Vec::with_capacity(tokens.len());
        let mut data = Vec::with_capacity(tokens.len() * 7);
        for token in tokens {
            if let Some(token) = token {
                let start = data.len();
                for c in token.chars() {
                    match chars.get(c as usize).copied().flatten() {
                        Some(b) => data.push(b),
                        None => {
                            // An added token is plain text, not in the byte alphabet.
                            data.truncate(start);
                            data.extend_from_slice(token.as_bytes());
                            break;
                        }
                    }
                }
            }
            ends.push(u32::try_from(data.len()).map_err(|_| "its tokens exceed 2^32 bytes")?);
        }
        let mut special: Vec<u32> = tokenizer
            .get_added_tokens_decoder()
            .iter()
            .filter(|(_, t)| t.special && !STRUCTURE.contains(&t.content.as_str()))
            .map(|(&id, _)| id)
            .collect();
        special.sort_unstable();
        Ok(TokenBytes {
            ends,
            data,
            special,
            known: vocab.len(),
        })
    }

    /// The bytes of a token; empty for an id without one.
    pub fn get(&self, id: u32) -> &[u8] {
        let id = id as usize;
        match self.ends.get(id) {
            None => &[],
            Some(&end) => {
                let start = if id == 0 { 0 } else { self.ends[id - 1] };
                &self.data[start as usize..end as usize]
            }
        }
    }

    /// True for tokens marked special (`<|im_end|>`), which texts leave out. Not for `<think>` and others that
    /// divide an answer, which some tokenizers mark too: they are looked for in the text.
    pub fn is_special(&self, id: u32) -> bool {
        self.special.binary_search(&id).is_ok()
    }

    /// Bytes of the longest token.
    fn longest(&self) -> usize {
        let ids = 0..self.ends.len() as u32;
        ids.map(|id| self.get(id).len()).max().unwrap_or(0)
    }

    fn max_id(&self) -> u32 {
        (self.ends.len() - 1) as u32
    }
}

/// Byte-level BPE writes bytes as characters (the table of GPT-2's `bytes_to_unicode`):
/// printable Latin-1 as itself, the other 68 bytes as U+0100 onwards. Indexed by character.
fn char_bytes() -> Vec<Option<u8>> {
    let mut table = vec![None; 0x100 + 68];
    let mut next = 0x100;
    for byte in 0..=255u8 {
        let printable = matches!(byte, 0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF);
        let c = if printable {
            usize::from(byte)
        } else {
            next += 1;
            next - 1
        };
        table[c] = Some(byte);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn byte_alphabet_is_a_bijection() {
        let mut bytes: Vec<u8> = char_bytes().into_iter().flatten().collect();
        bytes.sort_unstable();
        assert_eq!(bytes, (0..=255).collect::<Vec<u8>>());
        assert_eq!(char_bytes()['Ġ' as usize], Some(b' '));
        assert_eq!(char_bytes()['Ċ' as usize], Some(b'\n'));
    }
}
