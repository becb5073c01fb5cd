//! What an answer is held to while it is drawn: a constraint on its tokens, and a budget of thinking.

use nq_runtime::Sampler;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// The tokens that a grammar, a schema or another rule allows next.
pub trait Constraint: Send {
    /// Bits of the tokens that may follow, `i % 32` of word `i / 32` for token `i`; `None`: all.
    ///
    /// # Errors
    /// A description of the error, with which the request ends.
    fn mask(&mut self) -> Result<Option<&[u32]>, String>;

    /// Advances the constraint by the token that was drawn.
    fn accept(&mut self, token: u32) -> Result<(), String>;
}

/// The most tokens of thinking in an answer, and how it is closed when they are spent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ThinkingBudget {
    /// Tokens of thinking, at least one.
    pub tokens: usize,
    /// True if the prompt has begun the thinking.
    pub thinks: bool,
    /// The token that begins it.
    pub begin: u32,
    /// The token that ends it.
    pub end: u32,
    /// What is written to close it, with that token.
    pub close: Vec<u32>,
}

/// What one answer is held to, and how far it has come. Whoever draws the answer's tokens may draw [`Hold::run`] of them
/// before it hands them to [`Hold::accept`] and asks for the next mask.
#[derive(Default)]
pub struct Hold {
    constraint: Option<Box<dyn Constraint>>,
    thinking: Option<ThinkingBudget>,
    /// Number of drawn tokens at which thinking has spent its budget, until that was looked at.
    look: Option<usize>,
    /// True once the sampler has the mask for the next token.
    masked: bool,
}

impl Hold {
    /// At the beginning of an answer.
    pub fn new(constraint: Option<Box<dyn Constraint>>, thinking: Option<ThinkingBudget>) -> Self {
        let look = thinking
            .as_ref()
            .map(|t| t.tokens.max(1) + usize::from(!t.thinks));
        Hold {
            constraint,
            thinking,
            look,
            masked: false,
        }
    }

    /// True if a constraint says what may follow, which is known one token at a time.
    pub fn is_constrained(&self) -> bool {
        self.constraint.is_some()
    }

    /// True if the sampler lacks the mask for the next token.
    pub fn wants_mask(&self) -> bool {
        self.is_constrained() && !self.masked
    }

    /// Number of tokens, of the `left` that may still be drawn, to draw before it must be asked again; `drawn` there
    /// are.
    pub fn run(&self, drawn: usize, left: usize) -> usize {
        match (&self.constraint, self.look) {
            (Some(_), _) => 1,
            (None, Some(look)) => left.min(look - drawn),
            (None, None) => left,
        }
    }

    /// True if the token drawn last, which makes `drawn`, must be handed to [`Hold::accept`] before another is drawn.
    pub fn looks_at(&self, drawn: usize) -> bool {
        self.is_constrained() || self.look == Some(drawn)
    }

    /// Gives the sampler the mask for the next token.
    ///
    /// # Errors
    /// Why the constraint fails.
    pub fn mask(&mut self, sampler: &mut Sampler) -> Result<(), String> {
        let Some(constraint) = &mut self.constraint else {
            return Ok(());
        };
        let mask = catch_unwind(AssertUnwindSafe(|| {
            constraint.mask().map(|mask| sampler.set_mask(mask))
        }));
        self.masked = true;
        mask.unwrap_or_else(|_| Err("it panicked".into()))
    }

    /// Takes a token of the answer.
    ///
    /// # Errors
    /// Why the constraint fails.
    pub fn accept(&mut self, token: u32) -> Result<(), String> {
        self.masked = false;
        let Some(constraint) = &mut self.constraint else {
            return Ok(());
        };
        catch_unwind(AssertUnwindSafe(|| constraint.accept(token)))
            .unwrap_or_else(|_| Err("it panicked".into()))
    }

    /// What closes the thinking of an answer, of which `drawn` are the tokens, if they have just spent its budget: tokens
    /// that follow them and are to be accepted like drawn ones.
    pub fn closing(&mut self, drawn: &[u32]) -> Option<Vec<u32>> {
        self.look.take_if(|look| *look == drawn.len())?;
        let thinking = self.thinking.as_ref()?;
        let thinks = thinking.thinks || drawn.contains(&thinking.begin);
        (thinks && !drawn.contains(&thinking.end)).then(|| thinking.close.clone())
    }
}
