//! What errors call the parts of a request.

use crate::engine::Refused;
use crate::error::ApiError;

/// What a protocol calls parts of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Names {
    /// The prompt.
    pub prompt: &'static str,
    /// The format of the answer.
    pub format: &'static str,
}

impl Names {
    /// The error for a request that the engine refuses.
    pub(crate) fn refused(self, refused: Refused) -> ApiError {
        match refused {
            Refused::ContextFull { prompt, ctx } => self.full(prompt, ctx, ""),
            refused => refused.into(),
        }
    }

    /// An error of reading a prompt: the words of one that is longer than anybody counts are those of one that is
    /// too long.
    pub(crate) fn read(self, error: nq_runtime::Error, ctx: usize) -> ApiError {
        match error {
            nq_runtime::Error::TooLong { at_least, .. } => self.full(at_least, ctx, " or more"),
            error => error.into(),
        }
    }

    /// A prompt that does not fit, in the words that clients look for: on these, they shorten a conversation.
    fn full(self, prompt: usize, ctx: usize, more: &str) -> ApiError {
        let noun = match self.prompt {
            "messages" => "messages",
            _ => "prompt",
        };
        ApiError {
            code: Some("context_length_exceeded"),
            param: Some(self.prompt.to_owned()),
            overflow: Some((prompt as u32, ctx as u32 - 1)),
            ..ApiError::invalid(format!(
                "This model's maximum context length is {ctx} tokens. However, your {noun} resulted in {prompt} \
                 tokens{more}. Please reduce the length of the {noun}: at least one token is for the answer."
            ))
        }
    }
}
