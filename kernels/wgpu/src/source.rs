//! WGSL sources, with what differs between the kernels of one file.
//!
//! A kernel is made for its shapes: sizes become constants, and `#if`, `#for` and `#end` lines say what is left out or
//! repeated. WGSL has neither conditional code nor a way to ask for an unrolled loop, and registers can only be indexed
//! by numbers that the driver's compiler knows.

use std::fmt::Write;

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
            let lines: Vec<&str> = file.lines().collect();
            self.expand(&lines, &mut Vec::new(), &mut out);
        }
        out
    }

    /// Appends `lines`, in which loop variables have these values.
    fn expand(&self, lines: &[&str], values: &mut Vec<(char, u32)>, out: &mut String) {
        let mut at = 0;
        while at < lines.len() {
            let line = lines[at];
            if let Some(flag) = line.strip_prefix("#if ") {
                let block = Block::of(lines, at);
                let (then, otherwise) = block.branches(lines);
                let chosen = match self.flags.contains(&flag.trim()) {
                    true => then,
                    false => otherwise,
                };
                self.expand(chosen, values, out);
                at = block.end + 1;
            } else if let Some(head) = line.strip_prefix("#for ") {
                let block = Block::of(lines, at);
                let (name, count) = self.repeated(head);
                for value in 0..count {
                    values.push((name, value));
                    self.expand(&lines[at + 1..block.end], values, out);
                    values.pop();
                }
                at = block.end + 1;
            } else {
                out.push_str(&substituted(line, values));
                out.push('\n');
                at += 1;
            }
        }
    }

    /// The variable of a `#for` line, and how often it repeats.
    fn repeated(&self, head: &str) -> (char, u32) {
        let (name, count) = head.split_once(" in ").expect("#for NAME in COUNT");
        let known = self.integers.iter().find(|(known, _)| *known == count);
        let count = known.map_or_else(|| count.parse().expect("a constant"), |known| known.1);
        (name.chars().next().expect("a letter"), count)
    }
}

/// An `#if` or `#for` and its lines.
struct Block {
    begin: usize,
    otherwise: Option<usize>,
    end: usize,
}

impl Block {
    fn of(lines: &[&str], begin: usize) -> Self {
        let (mut depth, mut otherwise) = (0, None);
        for (at, line) in lines.iter().enumerate().skip(begin + 1) {
            match *line {
                "#end" if depth == 0 => {
                    return Block {
                        begin,
                        otherwise,
                        end: at,
                    };
                }
                "#end" => depth -= 1,
                "#else" if depth == 0 => otherwise = Some(at),
                line if line.starts_with("#if ") || line.starts_with("#for ") => depth += 1,
                _ => (),
            }
        }
        panic!("{} has no #end", lines[begin])
    }

    fn branches<'a, 'b>(&self, lines: &'a [&'b str]) -> (&'a [&'b str], &'a [&'b str]) {
        match self.otherwise {
            None => (&lines[self.begin + 1..self.end], &[]),
            Some(otherwise) => (
                &lines[self.begin + 1..otherwise],
                &lines[otherwise + 1..self.end],
            ),
        }
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
