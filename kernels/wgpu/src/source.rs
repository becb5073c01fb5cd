//! WGSL sources, with what differs between the kernels of one file.
//!
//! A kernel is made for its shapes: sizes become constants, and `#if`, `#for` and `#end` lines say what is left out or
//! repeated. WGSL has neither conditional code nor a way to ask for an unrolled loop, and registers can only be indexed
//! by numbers that the driver's compiler knows.

use std::fmt::Write;
use std::str::Lines;

/// The text of a kernel, and the values of its constants.
#[derive(Clone, Debug, Default)]
pub(crate) struct KernelSource {
    files: Vec<&'static str>,
    integers: Vec<(&'static str, u32)>,
    floats: Vec<(&'static str, f32)>,
    flags: Vec<&'static str>,
}

impl KernelSource {
    /// A kernel of these files, one behind the other.
    pub(crate) fn new(files: &[&'static str]) -> Self {
        KernelSource {
            files: files.to_vec(),
            ..KernelSource::default()
        }
    }

    /// With a further file.
    pub(crate) fn file(mut self, file: &'static str) -> Self {
        self.files.push(file);
        self
    }

    /// With a constant, which `#for` lines may name too.
    pub(crate) fn with(mut self, name: &'static str, value: usize) -> Self {
        // Sizes of a model's shape; a pass whose sizes overflow is refused by limits of the adapter long before.
        let value = u32::try_from(value).unwrap_or(u32::MAX);
        self.integers.push((name, value));
        self
    }

    /// With a constant of type f32.
    pub(crate) fn with_float(mut self, name: &'static str, value: f32) -> Self {
        self.floats.push((name, value));
        self
    }

    /// With a flag for `#if`, if it is `set`.
    pub(crate) fn flag(mut self, name: &'static str, set: bool) -> Self {
        if set {
            self.flags.push(name);
        }
        self
    }

    /// The WGSL.
    pub(crate) fn text(&self) -> String {
        let mut out = String::new();
        for (name, value) in &self.integers {
            let _ = writeln!(out, "const {name}: u32 = {value}u;");
        }
        for (name, value) in &self.floats {
            let _ = writeln!(out, "const {name}: f32 = {value:?};");
        }
        let step = include_str!("wgsl/step.wgsl");
        for file in [step].iter().chain(&self.files) {
            let rest = self.expand(&mut file.lines(), true, &mut Vec::new(), &mut out);
            assert_eq!(rest, None, "a line that ends what did not begin");
        }
        out
    }

    /// Appends the lines up to the `#else` or `#end` that is not theirs, which is returned, if they are `live`; loop
    /// variables have these values.
    fn expand<'a>(
        &self,
        lines: &mut Lines<'a>,
        live: bool,
        values: &mut Vec<(char, u32)>,
        out: &mut String,
    ) -> Option<&'a str> {
        while let Some(line) = lines.next() {
            match line.split_once(' ') {
                Some(("#if", flag)) => {
                    let set = self.flags.contains(&flag.trim());
                    let end = self.expand(lines, live && set, values, out);
                    if end.expect("#end") == "#else" {
                        let end = self.expand(lines, live && !set, values, out);
                        end.expect("#end");
                    }
                }
                // Constants of what is left out may be missing.
                Some(("#for", head)) if live => {
                    let (name, count) = self.repeated(head);
                    for value in 0..count {
                        values.push((name, value));
                        self.expand(&mut lines.clone(), live, values, out);
                        values.pop();
                    }
                    let end = self.expand(lines, false, values, out);
                    end.expect("#end");
                }
                Some(("#for", _)) => {
                    let end = self.expand(lines, false, values, out);
                    end.expect("#end");
                }
                _ if line == "#else" || line == "#end" => return Some(line),
                _ if live => {
                    out.push_str(&substituted(line, values));
                    out.push('\n');
                }
                _ => (),
            }
        }
        None
    }

    /// The variable of a `#for` line, and how often it repeats.
    fn repeated(&self, head: &str) -> (char, u32) {
        let (name, count) = head.split_once(" in ").expect("#for NAME in COUNT");
        let known = self.integers.iter().find(|(known, _)| *known == count);
        let count = known.map_or_else(|| count.parse().expect("a constant"), |known| known.1);
        (name.chars().next().expect("a letter"), count)
    }
}

/// `line` with `$v` in place of a variable's value, and `@v4` of its value plus 4.
fn substituted(line: &str, values: &[(char, u32)]) -> String {
    let mut line = line.to_string();
    for (name, value) in values {
        line = line.replace(&format!("${name}"), &value.to_string());
        line = line.replace(&format!("@{name}4"), &(value + 4).to_string());
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_left_out_and_repeated() {
        let file = "#for i in COUNT\n#if ODD\nodd $i\n#else\n#for j in 2\na$i_$ju @i4\n#end\n#end\n#end\nlast";
        let source = KernelSource::new(&[file]).with("COUNT", 2);
        let plain = source.text();
        assert!(plain.starts_with("const COUNT: u32 = 2u;\n"), "{plain}");
        let lines = "a0_0u 4\na0_1u 4\na1_0u 5\na1_1u 5\nlast\n";
        assert!(plain.ends_with(&format!("}}\n{lines}")), "{plain}");
        let odd = source.with_float("HALF", 0.5).flag("ODD", true).text();
        assert!(odd.contains("const HALF: f32 = 0.5;\n"), "{odd}");
        assert!(odd.ends_with("}\nodd 0\nodd 1\nlast\n"), "{odd}");
    }
}
