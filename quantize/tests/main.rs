//! All tests of quantizing that need no access to its modules: one program, so that it is linked once.

mod cards;
mod cuda;
