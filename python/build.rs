//! Lets macOS's linker leave Python's symbols to the interpreter that loads the module.

fn main() {
    pyo3_build_config::add_extension_module_link_args();
}
