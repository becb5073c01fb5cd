//! Writes in Rust the constants and structures that kernels share with the host. The CUDA sources are their only
//! declaration.
//!
//! A source and its header become a module. It has their plain numbers, and the structures that kernels take as
//! arguments, whose names end in `Args`, with those that these contain or point to. Pointers become `Address`. Every
//! byte of a structure has a name, so that none is undefined: fields `before_NAME` fill gaps, and `padding` the end.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

/// What is read of a source and its header.
#[derive(Default)]
struct Source {
    includes: Vec<String>,
    constants: BTreeMap<String, Constant>,
    structs: BTreeMap<String, Struct>,
}

struct Constant {
    doc: String,
    kind: &'static str,
    value: u64,
}

struct Struct {
    doc: String,
    align: usize,
    /// Or why they cannot be read.
    fields: Result<Vec<Field>, String>,
}

struct Field {
    doc: String,
    name: String,
    kind: Kind,
    /// Of an array, outermost first.
    lengths: Vec<String>,
}

enum Kind {
    /// A number: its type in Rust, and its bytes.
    Number(&'static str, usize),
    /// To a structure, perhaps.
    Pointer(String),
    Struct(String),
    /// Without a name.
    Union(Vec<Field>),
}

/// What a structure's bytes are.
#[derive(Default)]
struct Layout {
    size: usize,
    align: usize,
    /// Bytes that nothing fills: before each field, and at the end.
    gaps: Vec<usize>,
    has_floats: bool,
    has_unions: bool,
    /// Arrays for which Rust derives no `Default`.
    has_long_arrays: bool,
}

/// The Rust text for `sources`, which are names of files and what stands in them.
///
/// # Errors
/// A text that names the structure, if a kernel's argument has a form that this module does not know.
pub(crate) fn rust<'a>(
    sources: impl Iterator<Item = (&'a str, &'a str)>,
) -> Result<String, String> {
    let mut all: BTreeMap<String, Source> = BTreeMap::new();
    for (file, text) in sources {
        let (stem, _) = file.split_once('.').unwrap_or((file, ""));
        all.entry(stem.into()).or_default().read(text);
    }
    let mut wanted = BTreeSet::new();
    for (module, source) in &all {
        for name in source.structs.keys().filter(|name| name.ends_with("Args")) {
            layout(&all, module, name)?;
            want(&all, module, name, &mut wanted);
        }
    }
    let mut out = String::new();
    for (module, source) in &all {
        let mut items = String::new();
        for (name, Constant { doc, kind, value }) in &source.constants {
            items += &format!("    /// {doc}\n    pub const {name}: {kind} = {value};\n");
        }
        for (name, s) in &source.structs {
            if wanted.contains(&(module.as_str(), name.as_str())) {
                items += &structure(&all, module, name, s)?;
            }
        }
        if !items.is_empty() {
            write!(out, "pub mod {module} {{\n{items}}}\n").map_err(|e| e.to_string())?;
        }
    }
    Ok(out)
}

impl Source {
    fn read(&mut self, text: &str) {
        let (mut doc, mut of_template) = (Vec::new(), false);
        let mut lines = text.lines();
        while let Some(line) = lines.next() {
            if let Some(comment) = line.strip_prefix("//") {
                doc.push(comment.trim());
                continue;
            }
            if let Some(file) = line.strip_prefix("#include \"") {
                self.includes
                    .extend(file.split('.').next().map(str::to_owned));
            } else if let Some(declared) = line.strip_prefix("constexpr ") {
                self.constants(declared, &doc.join(" "));
            } else if let Some(head) = line.strip_prefix("struct ").filter(|_| !of_template)
                && let Some(head) = head.strip_suffix(" {")
            {
                let (align, name) = match head
                    .strip_prefix("alignas(")
                    .and_then(|h| h.split_once(") "))
                {
                    Some((align, name)) => (number(align).unwrap_or(0) as usize, name),
                    None => (1, head),
                };
                let (doc, fields) = (doc.join(" "), fields(&mut lines));
                let read = Struct { doc, align, fields };
                self.structs.entry(name.into()).or_insert(read);
            }
            of_template = line.starts_with("template");
            doc.clear();
        }
    }

    /// The numbers of a line. What stands in both branches of an `#if` has the first value; what is computed has none.
    fn constants(&mut self, declared: &str, above: &str) {
        let (code, doc) = declared.split_once("//").unwrap_or((declared, above));
        let Some((kind, rest)) = code.split_once(' ') else {
            return;
        };
        let kind = match kind {
            "int" => "usize",
            "uint32_t" => "u32",
            "uint64_t" => "u64",
            _ => return,
        };
        for one in rest.trim().trim_end_matches(';').split(',') {
            if let Some((name, value)) = one.split_once(" = ")
                && let Some(value) = number(value)
            {
                let doc = if doc.is_empty() { name } else { doc };
                let doc = doc.trim().to_owned();
                let read = Constant { doc, kind, value };
                self.constants.entry(name.trim().into()).or_insert(read);
            }
        }
    }
}

/// A plain number, perhaps shifted.
fn number(text: &str) -> Option<u64> {
    if let Some((number_of, by)) = text.split_once(" << ") {
        return Some(number(number_of)? << number(by)?);
    }
    let text = text.trim().replace('\'', "");
    match text.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16).ok(),
        None => text.parse().ok(),
    }
}

/// The fields up to the line that closes a structure or union. Functions are passed over.
fn fields(lines: &mut std::str::Lines<'_>) -> Result<Vec<Field>, String> {
    let mut all: Vec<Field> = Vec::new();
    let (mut above, mut depth, mut error) = (String::new(), 0, None);
    while let Some(line) = lines.next() {
        let (code, comment) = line.split_once("//").unwrap_or((line, ""));
        let braces = code.matches('{').count() as isize - code.matches('}').count() as isize;
        let (indent, code) = (code.len(), code.trim());
        if depth > 0 {
            depth += braces;
        } else if code == "};" {
            return error.map_or(Ok(all), Err);
        } else if code == "union {" {
            let (name, kind) = ("union".into(), Kind::Union(fields(lines)?));
            let (doc, lengths) = (std::mem::take(&mut above), Vec::new());
            all.push(Field {
                doc,
                name,
                kind,
                lengths,
            });
        } else if code.is_empty() {
            // Far to the right a comment goes on that began beside a field.
            match all.last_mut().filter(|_| indent > 8) {
                Some(field) => field.doc += comment,
                None => above = above + comment + " ",
            }
        } else if code.contains('(')
            || ["static ", "template ", "#"]
                .iter()
                .any(|s| code.starts_with(s))
        {
            depth = braces;
            above.clear();
        } else {
            match declared(code, &(std::mem::take(&mut above) + comment)) {
                Some(fields) => all.extend(fields),
                None => {
                    depth = braces;
                    error.get_or_insert(format!("`{code}` is no field that Rust can have"));
                }
            }
        }
    }
    Err("it has no end".into())
}

/// The fields of one declaration, as `const float* a;` or `int b, c[2];`.
fn declared(code: &str, doc: &str) -> Option<Vec<Field>> {
    let code = code.strip_suffix(';')?;
    let code = code.strip_prefix("const ").unwrap_or(code);
    let (pointee, names) = match code.split_once("* ") {
        Some((pointee, names)) => (Some(pointee), names),
        None => (None, code),
    };
    let (kind, names) = match pointee {
        Some(_) => ("", names),
        None => {
            let first = names.split(',').next()?;
            let (kind, _) = first.rsplit_once(' ')?;
            (kind, &names[kind.len() + 1..])
        }
    };
    let is_name = |name: &str| {
        !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
    };
    let field = |text: &str| {
        let mut parts = text.trim().split('[');
        let name = parts.next().filter(|name| is_name(name))?.to_owned();
        let lengths = parts.map(|length| length.strip_suffix(']').map(str::to_owned));
        let kind = match kind {
            "int" => Kind::Number("i32", 4),
            "float" => Kind::Number("f32", 4),
            "double" => Kind::Number("f64", 8),
            "long long" => Kind::Number("i64", 8),
            "uint64_t" | "size_t" | "unsigned long long" => Kind::Number("u64", 8),
            "uint32_t" => Kind::Number("u32", 4),
            "uint16_t" => Kind::Number("u16", 2),
            "int16_t" => Kind::Number("i16", 2),
            "uint8_t" => Kind::Number("u8", 1),
            "" => Kind::Pointer(pointee?.to_owned()),
            other => Kind::Struct(Some(other).filter(|name| is_name(name))?.to_owned()),
        };
        Some(Field {
            doc: doc.trim().to_owned(),
            name,
            kind,
            lengths: lengths.collect::<Option<_>>()?,
        })
    };
    names.split(',').map(field).collect()
}

/// What `find` gives in `module` or in what it includes, with the module that has it.
fn found<'a, T>(
    all: &'a BTreeMap<String, Source>,
    module: &str,
    find: &dyn Fn(&'a Source) -> Option<T>,
) -> Option<(&'a str, T)> {
    let (module, source) = all.get_key_value(module)?;
    let here = find(source).map(|t| (module.as_str(), t));
    let mut includes = source.includes.iter().filter(|i| *i != module);
    here.or_else(|| includes.find_map(|i| found(all, i, find)))
}

type Named<'a> = (&'a str, (&'a str, &'a Struct));

fn found_struct<'a>(
    all: &'a BTreeMap<String, Source>,
    module: &str,
    name: &str,
) -> Option<Named<'a>> {
    found(all, module, &|s| {
        let (name, found) = s.structs.get_key_value(name)?;
        Some((name.as_str(), found))
    })
}

/// The lengths of a field, in numbers.
fn lengths(
    all: &BTreeMap<String, Source>,
    module: &str,
    field: &Field,
) -> Result<Vec<usize>, String> {
    let one = |text: &String| {
        let named =
            || found(all, module, &|s| s.constants.get(text.as_str())).map(|(_, c)| c.value);
        let length = number(text).or_else(named).map(|n| n as usize);
        length.ok_or_else(|| format!("{}: {text} is not known", field.name))
    };
    field.lengths.iter().map(one).collect()
}

impl Layout {
    /// Goes on at a multiple of `align`.
    fn fill(&mut self, align: usize) {
        let next = self.size.next_multiple_of(align);
        self.gaps.push(next - self.size);
        self.size = next;
    }
}

fn layout(all: &BTreeMap<String, Source>, module: &str, name: &str) -> Result<Layout, String> {
    let of_text = |e: String| format!("struct {name}, as {module} sees it: {e}");
    let (home, (_, found)) =
        found_struct(all, module, name).ok_or_else(|| of_text("it is not found".into()))?;
    let fields = found.fields.as_ref().map_err(|e| of_text(e.clone()))?;
    let mut whole = Layout {
        align: found.align,
        ..Layout::default()
    };
    for field in fields {
        let one = field_layout(all, home, field).map_err(of_text)?;
        whole.fill(one.align);
        whole.size += one.size;
        whole.align = whole.align.max(one.align);
        whole.has_floats |= one.has_floats;
        whole.has_unions |= one.has_unions;
        whole.has_long_arrays |= one.has_long_arrays;
    }
    whole.fill(whole.align);
    Ok(whole)
}

fn field_layout(
    all: &BTreeMap<String, Source>,
    module: &str,
    field: &Field,
) -> Result<Layout, String> {
    let mut one = match &field.kind {
        Kind::Number(name, size) => Layout {
            size: *size,
            align: *size,
            has_floats: name.starts_with('f'),
            ..Layout::default()
        },
        Kind::Pointer(_) => Layout {
            size: 8,
            align: 8,
            ..Layout::default()
        },
        Kind::Struct(name) => layout(all, module, name)?,
        Kind::Union(fields) => {
            let mut widest = Layout {
                has_unions: true,
                ..Layout::default()
            };
            for field in fields {
                let one = field_layout(all, module, field)?;
                (widest.size, widest.align) =
                    (widest.size.max(one.size), widest.align.max(one.align));
            }
            widest
        }
    };
    for length in lengths(all, module, field)? {
        one.size *= length;
        one.has_long_arrays |= length > 32;
    }
    Ok(one)
}

/// Adds a structure to `wanted`, and what it contains or points to, if Rust can have that.
fn want<'a>(
    all: &'a BTreeMap<String, Source>,
    module: &str,
    name: &str,
    wanted: &mut BTreeSet<(&'a str, &'a str)>,
) {
    let Some((home, (name, found))) = found_struct(all, module, name) else {
        return;
    };
    if layout(all, home, name).is_err() || !wanted.insert((home, name)) {
        return;
    }
    for field in found.fields.iter().flatten() {
        let inner = match &field.kind {
            Kind::Union(fields) => fields.as_slice(),
            _ => std::slice::from_ref(field),
        };
        for field in inner {
            if let Kind::Struct(name) | Kind::Pointer(name) = &field.kind {
                want(all, home, name, wanted);
            }
        }
    }
}

/// The Rust text of a structure, and of its union.
fn structure(
    all: &BTreeMap<String, Source>,
    module: &str,
    name: &str,
    found: &Struct,
) -> Result<String, String> {
    let bytes = layout(all, module, name)?;
    let mut derives = "Clone, Copy".to_owned();
    if !bytes.has_unions {
        derives += ", Debug, PartialEq";
        derives += if bytes.has_floats { "" } else { ", Eq" };
        derives += if bytes.has_long_arrays {
            ""
        } else {
            ", Default, bytemuck::Pod, bytemuck::Zeroable"
        };
    }
    let align = if found.align > 1 {
        format!(", align({})", found.align)
    } else {
        String::new()
    };
    let mut out = format!(
        "    /// {}\n    #[derive({derives})]\n    #[repr(C{align})]\n    pub struct {name} {{\n",
        found.doc
    );
    let mut unions = String::new();
    let line = |field: &Field, kind: String| {
        let array = |kind, length: &usize| format!("[{kind}; {length}]");
        let kind = lengths(all, module, field)?.iter().rev().fold(kind, array);
        Ok::<_, String>(format!(
            "        /// {}\n        pub {}: {kind},\n",
            field.doc, field.name
        ))
    };
    let names = found.fields.iter().flatten().map(Some);
    for (field, gap) in names.chain([None]).zip(bytes.gaps) {
        if gap > 0 {
            let name = field.map_or("padding".into(), |field| format!("before_{}", field.name));
            let (kind, count) = if gap % 4 == 0 {
                ("u32", gap / 4)
            } else {
                ("u8", gap)
            };
            out += &format!("        /// Zero.\n        pub {name}: [{kind}; {count}],\n");
        }
        let Some(field) = field else {
            break;
        };
        if let Kind::Union(fields) = &field.kind {
            unions += &format!(
                "    /// Of [`{name}`].\n    #[derive(Clone, Copy)]\n    #[repr(C)]\n    pub union {name}Union {{\n"
            );
            for field in fields {
                unions += &line(field, rust_type(all, module, name, &field.kind))?;
            }
            unions += "    }\n";
        }
        out += &line(field, rust_type(all, module, name, &field.kind))?;
    }
    Ok(out + "    }\n" + &unions)
}

fn rust_type(all: &BTreeMap<String, Source>, module: &str, owner: &str, kind: &Kind) -> String {
    match kind {
        Kind::Number(name, _) => (*name).into(),
        Kind::Pointer(_) => "crate::driver::Address".into(),
        Kind::Union(_) => format!("{owner}Union"),
        Kind::Struct(name) => {
            let home = found_struct(all, module, name).map_or(module, |(home, _)| home);
            format!("super::{home}::{name}")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::rust;

    const HEADER: &str = "// Four of them.
constexpr int MOST = 4, ROOM = 2 << 10;
constexpr int COMPUTED = MOST * 2;   // which Rust has to say itself

struct alignas(16) Kind {
    uint8_t scheme;     // of a mix,
                        // in order
    static constexpr int EIGHT = 8;
    DEVICE int twice() const {
        return 2 * scheme;
    }
};

template <int N>
struct Hidden {
    int a[N];
};
";

    const SOURCE: &str = "#include \"kinds.cuh\"

struct Pointed {
    int rows[MOST];
};

struct Unused {
    bool flag;
};

// What it takes.
struct OneArgs {
    // Of all rows,
    // in order.
    const Pointed* first;
    Unused* second;
    int n, pairs[2][3];
    Kind kind;
    union {
        float one;
        long long two;
    };
};
";

    #[test]
    fn structures_and_constants_are_those_of_the_sources() {
        let sources = [("one.cu", SOURCE), ("kinds.cuh", HEADER)];
        let text = rust(sources.into_iter()).unwrap();
        let squeezed = text.split_whitespace().collect::<Vec<_>>().join(" ");
        for expected in [
            "pub mod kinds { /// Four of them. pub const MOST: usize = 4; /// Four of them. pub const ROOM: usize = 2048; \
             /// #[derive(Clone, Copy, Debug, PartialEq, Eq, Default, bytemuck::Pod, bytemuck::Zeroable)] \
             #[repr(C, align(16))] pub struct Kind { /// of a mix, in order pub scheme: u8, /// Zero. pub padding: [u8; 15], } }",
            "pub mod one { /// What it takes. #[derive(Clone, Copy)] #[repr(C)] pub struct OneArgs { \
             /// Of all rows, in order. pub first: crate::driver::Address, /// pub second: crate::driver::Address, \
             /// pub n: i32, /// pub pairs: [[i32; 3]; 2], /// Zero. pub before_kind: [u32; 1], /// pub kind: super::kinds::Kind, \
             /// pub union: OneArgsUnion, /// Zero. pub padding: [u32; 2], } \
             /// Of [`OneArgs`]. #[derive(Clone, Copy)] #[repr(C)] pub union OneArgsUnion { /// pub one: f32, /// pub two: i64, }",
            "pub struct Pointed { /// pub rows: [i32; 4], }",
        ] {
            assert!(squeezed.contains(expected), "{expected}\n{squeezed}");
        }
        // What is computed, what nobody takes, and what Rust cannot have.
        for absent in ["COMPUTED", "Unused", "Hidden", "EIGHT", "twice"] {
            assert!(!text.contains(absent), "{absent}\n{text}");
        }
    }

    #[test]
    fn arguments_that_rust_cannot_have_are_errors() {
        for (field, expected) in [
            (
                "bool flag;",
                "struct TheArgs, as a sees it: struct bool, as a sees it: it is not found",
            ),
            ("Other o;", "struct Other, as a sees it: it is not found"),
            (
                "int a[N];",
                "struct TheArgs, as a sees it: a: N is not known",
            ),
            (
                "int (*f)(int);\n    int* const p;",
                "`int* const p;` is no field that Rust can have",
            ),
        ] {
            let source = format!("struct TheArgs {{\n    {field}\n}};\n");
            let error = rust([("a.cu", source.as_str())].into_iter()).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
    }
}
