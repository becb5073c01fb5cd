//! The interfaces of the runtime: what a device offers, whatever it is, and what is asked of it. They know none of
//! the modules that use or implement them.
//!
//! One forward serves chat, evaluation, calibration and sensitivity: [`Session::forward`] takes a batch of token
//! chunks, appends them to sequences whose state the session owns, and returns the logits wanted; an
//! [`Observer`] may look on. What only some devices can do are parts of a session that it may have: [`Pages`],
//! [`StepsAhead`], [`Streams`].

mod adapters;
mod ahead;
mod chunk;
mod drafts;
mod engine;
mod observer;
mod options;
mod ordinals;
mod pages;
mod session;
mod tower;

pub use adapters::AppliedAdapter;
pub use ahead::bucket;
pub use ahead::{Drawn, Run, StepsAhead};
pub use chunk::{Chunk, Logits, LogitsWanted};
pub use drafts::{Draft, DraftLayer, DraftedBy, Drafter, KINDS, StreamHead, Streams, Tapped};
pub use engine::{
    DeviceMemory, Engine, EngineDescription, ExpertChoices, HeatKeeper, LayerChoices, Placed,
    Planner,
};
pub use observer::Observer;
pub use options::too_many;
pub use options::{ActivationChoice, DeviceChoice, EngineKind, LoadOptions, Split};
pub use ordinals::Ordinals;
pub use pages::Pages;
pub use session::{Session, SessionSpec};
pub use tower::{ImageRows, PlacedImage, Tower, check_patches};
