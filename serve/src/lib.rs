//! Serves models to many clients: an engine that answers many requests at once ([`Engine`]), and a
//! server that speaks OpenAI's and Anthropic's protocols over it.
//!
//! A part of nq that may change in any version: programs use `nq-llm`.

#![forbid(unsafe_code)]

pub mod about;
mod disk;
pub mod engine;
mod error;
mod generation;
mod http;
mod images;
mod metrics;
mod model;
mod models;
mod names;
mod prefix;
pub mod protocol;
pub mod reading;
pub mod room;
pub(crate) mod scheduler;

pub use about::About;
pub use disk::{ModelPages, PageStore};
pub use engine::{Answers, Client, Engine, EngineOptions, Event, Finish, OpenDrafts, Request};
pub use error::ApiError;
pub use http::{HttpLimits, Security, Server, Stopper};
pub use model::ServedModel;
pub use models::{LoadError, ModelSource, Models};
