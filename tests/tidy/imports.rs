//! Which file imports which: names resolved to the defining file, through re-exports. Works on text, so a macro's call
//! must spell what it defines (`struct Name`), and imports of a name that no file spells are reported. A `mod x;` line,
//! or a `pub use` that only re-exports a name, does not count. Never compiles anything.
use regex::Regex;
use std::collections::{BTreeMap, BTreeSet};

/// Where a file's unit tests start.
pub const TESTS: &str = r"#\[cfg\((?:all\()?test[^\]]*\)\]\s*(?:pub(?:\([a-z: ]+\))? )?mod \w+ *\{";

/// A module's location: the crate, then modules.
type Module = Vec<String>;

struct SourceFile {
    path: String,
    code: String,
    uses: Vec<Use>,
    defines: BTreeSet<String>,
}

struct Use {
    /// Names it re-exports.
    public: bool,
    path: Vec<String>,
    name: String,
}

pub struct Imports {
    files: BTreeMap<Module, SourceFile>,
}

struct Patterns {
    comment: Regex,
    string: Regex,
    tests: Regex,
    module: Regex,
    import: Regex,
    definition: Regex,
    path: Regex,
}

impl Patterns {
    fn new() -> Patterns {
        let regex = |text| Regex::new(text).unwrap();
        Patterns {
            comment: regex(r"//[^\n]*|(?s:/\*.*?\*/)"),
            // and characters, one of which may be a quotation mark
            string: regex(r#"(?s)'(?:\\.|[^'\\])'|"(?:\\.|[^"\\])*""#),
            tests: regex(TESTS),
            module: regex(r"((?:#\[[^\]]*\]\s*)*)(?:pub(?:\([a-z: ]+\))? )?mod (?:r#)?(\w+);"),
            import: regex(r"(pub(?:\([a-z: ]+\))? )?\buse ([^;]+);"),
            definition: regex(
                r"\b(?:const\s+fn|struct|enum|trait|type|union|fn|const|static|mod|macro_rules!)\s+(?:r#)?(\w+)",
            ),
            path: regex(r"\b(?:r#)?\w+(?:::(?:r#)?\w+)+"),
        }
    }
}

impl Imports {
    /// Parses crates, each given by its name in paths and its root file. `read` returns a file's text by its path.
    pub fn read(crates: &[(&str, &str)], read: &dyn Fn(&str) -> Option<String>) -> Imports {
        let patterns = Patterns::new();
        let mut imports = Imports { files: BTreeMap::new() };
        for (name, root) in crates {
            imports.add(&patterns, vec![name.to_string()], root, read);
        }
        imports
    }

    fn add(&mut self, patterns: &Patterns, module: Module, path: &str, read: &dyn Fn(&str) -> Option<String>) {
        let text = read(path).unwrap_or_else(|| panic!("{path} does not exist"));
        let text = patterns.string.replace_all(&patterns.comment.replace_all(&text, ""), "\"\"").into_owned();
        let end = patterns.tests.find(&text).map_or(text.len(), |m| m.start());
        let code = text[..end].to_string();
        let (folder, file) = path.rsplit_once('/').unwrap();
        let below = match file {
            "mod.rs" | "lib.rs" | "main.rs" => folder.to_string(),
            _ => format!("{folder}/{}", file.trim_end_matches(".rs")),
        };
        for found in patterns.module.captures_iter(&code) {
            let (attributes, name) = (&found[1], &found[2]);
            let paths = [format!("{below}/{name}.rs"), format!("{below}/{name}/mod.rs")];
            if let Some(path) = paths.iter().find(|p| !attributes.contains("test") && read(p).is_some()) {
                self.add(patterns, [&module[..], &[name.to_string()]].concat(), path, read);
            }
        }
        let mut uses = Vec::new();
        for found in patterns.import.captures_iter(&code) {
            flatten(&found[2], &[], &mut |path| {
                let (path, alias) = match path.last().and_then(|last| last.split_once(" as ")) {
                    Some((last, alias)) => {
                        ([&path[..path.len() - 1], &[last.trim().to_string()]].concat(), Some(alias.trim().into()))
                    }
                    None => (path.to_vec(), None),
                };
                let path =
                    if path.last().is_some_and(|p| p == "self") { path[..path.len() - 1].to_vec() } else { path };
                let name = alias.or(path.last().cloned()).unwrap_or_default();
                uses.push(Use { public: found.get(1).is_some(), path, name });
            });
        }
        let defines = patterns.definition.captures_iter(&code).map(|d| d[1].to_string()).collect();
        let code = patterns.import.replace_all(&code, "").into_owned();
        self.files.insert(module, SourceFile { path: path.into(), code, uses, defines });
    }

    /// Resolves a path used in `module` from the root of its crate: the starting module, and the rest. None for other
    /// crates.
    fn absolute(&self, module: &Module, path: &[String]) -> Option<(Module, Vec<String>)> {
        let first = path.first()?.as_str();
        let root = vec![module[0].clone()];
        let (at, rest) = match first {
            "crate" => (root, path[1..].to_vec()),
            "self" => (module.clone(), path[1..].to_vec()),
            "super" => {
                let up = path.iter().take_while(|p| *p == "super").count();
                (module[..module.len().checked_sub(up)?].to_vec(), path[up..].to_vec())
            }
            _ if self.files.contains_key(&vec![first.to_string()]) => (vec![first.into()], path[1..].to_vec()),
            _ if self.files.contains_key(&[&module[..], &[first.to_string()]].concat()) => {
                (module.clone(), path.to_vec())
            }
            _ => {
                // A module that the file imports: `use super::words;`, then `words::Phase`.
                let imported = |import: &&Use| import.name == first && import.path[0] != first;
                let import = self.files.get(module)?.uses.iter().find(imported)?;
                return self.absolute(module, &[&import.path[..], &path[1..]].concat());
            }
        };
        // A crate under another name: `pub use flatshard_base as base;`, then `crate::base::Error`.
        let known = |import: &&Use| import.path.len() == 1 && self.files.contains_key(&import.path);
        let renamed = rest
            .first()
            .filter(|_| at.len() == 1)
            .and_then(|first| self.files.get(&at)?.uses.iter().filter(known).find(|import| import.name == *first));
        Some(renamed.map_or((at, rest.clone()), |import| (import.path.clone(), rest[1..].to_vec())))
    }

    /// The module whose file defines what `path` names from `module`; None for a module itself or an unknown name.
    fn definition(&self, mut module: Module, path: &[String], depth: usize) -> Option<Module> {
        let mut path = path;
        while let Some((first, rest)) = path.split_first() {
            let below = [&module[..], std::slice::from_ref(first)].concat();
            if !self.files.contains_key(&below) {
                break;
            }
            (module, path) = (below, rest);
        }
        let (file, name) = (self.files.get(&module)?, path.first()?);
        if name == "*" || file.defines.contains(name) {
            return (name != "*").then_some(module);
        }
        if depth == 0 {
            return None;
        }
        file.uses.iter().find_map(|import| {
            let glob = import.path.last().is_some_and(|last| last == "*");
            if import.name != *name && !glob {
                return None;
            }
            let target: Vec<String> = match glob {
                true => [&import.path[..import.path.len() - 1], path].concat(),
                false => [&import.path[..], &path[1..]].concat(),
            };
            let (at, rest) = self.absolute(&module, &target)?;
            self.definition(at, &rest, depth - 1)
        })
    }

    /// For each file, the files it imports from, and the names.
    fn edges(&self) -> BTreeMap<&Module, BTreeMap<Module, BTreeSet<String>>> {
        let patterns = Patterns::new();
        let mut edges: BTreeMap<&Module, BTreeMap<Module, BTreeSet<String>>> = BTreeMap::new();
        for (module, file) in &self.files {
            let mut tie = |path: &[String]| {
                let found = self.absolute(module, path).and_then(|(at, rest)| self.definition(at, &rest, 8));
                if let Some(target) = found.filter(|target| target != module) {
                    let name = path.last().cloned().unwrap_or_default();
                    edges.entry(module).or_default().entry(target).or_default().insert(name);
                }
            };
            for import in &file.uses {
                let word = Regex::new(&format!(r"\b{}\b", regex::escape(&import.name))).unwrap();
                if !import.public || word.is_match(&file.code) {
                    tie(&import.path);
                }
            }
            for found in patterns.path.find_iter(&file.code) {
                let path: Vec<String> = found.as_str().split("::").map(|p| p.trim_start_matches("r#").into()).collect();
                match file.uses.iter().find(|import| import.name == path[0]) {
                    Some(import) => tie(&[&import.path[..], &path[1..]].concat()),
                    None => tie(&path),
                }
            }
        }
        edges
    }

    /// Imports from these crates whose name is found in no file, so that circles through them would not be seen.
    pub fn unknown(&self) -> Vec<String> {
        let mut unknown = Vec::new();
        for (module, file) in &self.files {
            for import in &file.uses {
                let Some((at, rest)) = self.absolute(module, &import.path) else { continue };
                let named = [&at[..], &rest[..]].concat();
                let glob = rest.last().is_some_and(|last| last == "*");
                // `use super::Value;`, where the parent imports it from another crate.
                let foreign = |import: &Use| import.name == rest[0] && self.absolute(&at, &import.path).is_none();
                let known = glob
                    || self.files.contains_key(&named)
                    || self.definition(at.clone(), &rest, 8).is_some()
                    || self.files.get(&at).is_some_and(|file| file.uses.iter().any(foreign));
                if !known {
                    unknown.push(format!("{}: {}", file.path, import.path.join("::")));
                }
            }
        }
        unknown
    }

    /// Sets of files that depend on each other, each as the lines that cause it.
    pub fn circles(&self) -> Vec<Vec<String>> {
        let edges = self.edges();
        let reach = |from: &Module| {
            let (mut seen, mut next) = (BTreeSet::new(), vec![from.clone()]);
            while let Some(module) = next.pop() {
                for target in edges.get(&module).into_iter().flat_map(|targets| targets.keys()) {
                    if seen.insert(target.clone()) {
                        next.push(target.clone());
                    }
                }
            }
            seen
        };
        let reached: BTreeMap<&Module, BTreeSet<Module>> = self.files.keys().map(|m| (m, reach(m))).collect();
        let mut circles: Vec<BTreeSet<&Module>> = Vec::new();
        for (module, targets) in &reached {
            if targets.contains(*module) && !circles.iter().any(|circle| circle.contains(module)) {
                let both = |other: &&Module| targets.contains(*other) && reached[*other].contains(*module);
                circles.push(reached.keys().copied().filter(both).collect());
            }
        }
        let path = |module: &Module| &self.files[module].path;
        let lines = |circle: &BTreeSet<&Module>| -> Vec<String> {
            let ties = circle.iter().flat_map(|from| edges[*from].iter().map(move |(to, names)| (*from, to, names)));
            let inside = ties.filter(|(_, to, _)| circle.contains(to));
            inside.map(|(from, to, names)| format!("{} -> {}: {names:?}", path(from), path(to))).collect()
        };
        circles.iter().map(lines).collect()
    }
}

/// `a::{b, c::{d, e}}` as a::b, a::c::d and a::c::e.
fn flatten(text: &str, before: &[String], found: &mut dyn FnMut(&[String])) {
    let text = text.trim();
    let names = |text: &str| -> Vec<String> {
        let names = text.split("::").map(|name| name.trim().trim_start_matches("r#").to_string());
        names.filter(|name| !name.is_empty()).collect()
    };
    match text.find('{').filter(|_| text.ends_with('}')) {
        None if text.is_empty() => {}
        None => found(&[before, &names(text)].concat()),
        Some(open) => {
            let before = [before, &names(&text[..open])].concat();
            let (mut depth, mut start, inside) = (0, 0, &text[open + 1..text.len() - 1]);
            for (at, c) in inside.char_indices() {
                match c {
                    '{' => depth += 1,
                    '}' => depth -= 1,
                    ',' if depth == 0 => {
                        flatten(&inside[start..at], &before, found);
                        start = at + 1;
                    }
                    _ => {}
                }
            }
            flatten(&inside[start..], &before, found);
        }
    }
}
