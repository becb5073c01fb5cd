//! All tests of evaluation: one program, so that it is linked once.

mod common;
mod demo;
mod protocols;
mod variants;
