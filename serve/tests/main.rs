//! All tests of the server: one program, so that it is linked once.

mod adapters;
mod asked;
mod calls;
mod clients;
mod common;
mod conversations;
mod cuts;
mod engine;
mod hostile;
mod http;
mod hybrids;
mod images;
mod load;
mod models;
mod ollama;
mod openai;
mod reading;
mod scores;
mod shapes;
mod sharing;
mod thinking;
mod tools;
mod transport;
mod wording;
