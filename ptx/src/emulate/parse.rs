//! Tokens to kernels: names become register slots, offsets and instruction indices. Instructions are passed to
//! decode.rs. What ptxas refuses (mismatched types) is not checked again.
use super::decode::decode;
use super::kernel::{Field, Instruction, PtxKernel};
use super::lex::{Lexed, SourceLine, Token, bad, lex};
use super::operand::{Decoded, PtxOperand, Register, SHARED_BASE, SpecialRegister};
use std::collections::HashMap;

/// Gap between shared arrays in bytes, so that overruns are detected. A multiple of all 32 banks.
const RED_ZONE: u64 = 128;
/// An [`Epoch`](super::clock::Epoch) names one in 16 bits.
const MOST_INSTRUCTIONS: usize = u16::MAX as usize + 1;

/// All entry points of `source`. `file` names it in errors, unless `# line "file"` markers name another.
pub fn parse(file: &str, source: &str) -> Decoded<Vec<PtxKernel>> {
    let Lexed { tokens, files } = lex(file, source)?;
    let (scopes, kernels) = (vec![HashMap::new()], vec![]);
    let mut parser = PtxParser { tokens: &tokens, files: &files, at: 0, scopes, kernels, dynamic: None, blame: None };
    match parser.module() {
        Ok(()) => Ok(parser.kernels),
        Err(what) => {
            let last = tokens.get(parser.at.saturating_sub(1)).or(tokens.last()).map(|t| t.1);
            let place = parser.blame.or(last).unwrap_or(SourceLine { file: 0, line: 1 });
            Err(format!("{}:{}: {what}", files[place.file], place.line))
        }
    }
}

/// An instruction with unresolved labels.
struct RawInstruction<'a> {
    guard: Option<(Register, bool)>,
    mnemonic: &'a str,
    operands: Vec<PtxOperand>,
    place: SourceLine,
}

struct PtxParser<'a> {
    tokens: &'a [(Token<'a>, SourceLine)],
    files: &'a [String],
    at: usize,
    scopes: Vec<HashMap<String, PtxOperand>>,
    kernels: Vec<PtxKernel>,
    /// The array `.extern .shared .b8 name[]` of the module, whose length the launch gives.
    dynamic: Option<Field>,
    /// Position of an error that is found after its tokens were read.
    blame: Option<SourceLine>,
}

/// The kernel being parsed.
struct Body<'a> {
    kernel: PtxKernel,
    raw: Vec<RawInstruction<'a>>,
    /// Label references: [`PtxOperand::Label`] holds an index into these until their block ends.
    wanted: Vec<&'a str>,
    found: Vec<Option<usize>>,
}

impl<'a> PtxParser<'a> {
    fn peek(&self) -> Option<Token<'a>> {
        self.tokens.get(self.at).map(|t| t.0)
    }
    fn next(&mut self) -> Decoded<Token<'a>> {
        let token = self.peek().ok_or("unexpected end of text")?;
        self.at += 1;
        Ok(token)
    }
    fn eat(&mut self, mark: char) -> bool {
        let found = self.peek() == Some(Token::Mark(mark));
        self.at += found as usize;
        found
    }
    fn want(&mut self, mark: char) -> Decoded<()> {
        if self.eat(mark) { Ok(()) } else { Err(format!("expected '{mark}', found {:?}", self.next()?)) }
    }
    fn word(&mut self) -> Decoded<&'a str> {
        match self.next()? {
            Token::Word(word) => Ok(word),
            other => Err(format!("expected a name, found {other:?}")),
        }
    }
    fn number(&mut self) -> Decoded<u64> {
        match self.next()? {
            Token::Number(number) => Ok(number),
            other => Err(format!("expected a number, found {other:?}")),
        }
    }
    fn define(&mut self, name: &str, operand: PtxOperand) -> Decoded<()> {
        let scope = self.scopes.last_mut().ok_or("a '}' too many")?;
        match scope.insert(name.to_string(), operand) {
            Some(_) => Err(format!("'{name}' is defined twice")),
            None => Ok(()),
        }
    }
    fn module(&mut self) -> Decoded<()> {
        while self.peek().is_some() {
            match self.word()? {
                ".version" | ".target" | ".address_size" => drop(self.next()?),
                ".visible" => {}
                ".extern" => {
                    if self.word()? != ".shared" || self.dynamic.is_some() {
                        return Err("only one .extern array of shared memory is modeled".into());
                    }
                    let field = self.field(0)?;
                    self.define(&field.name, PtxOperand::Variable(SHARED_BASE))?;
                    self.dynamic = Some(field);
                    self.want(';')?;
                }
                ".entry" => self.entry()?,
                other => return Err(format!("'{other}' is not modeled")),
            }
        }
        Ok(())
    }
    fn entry(&mut self) -> Decoded<()> {
        let name = self.word()?;
        let kernel = PtxKernel {
            name: name.into(),
            parameters: vec![],
            instructions: vec![],
            registers: vec![],
            shared: self.dynamic.iter().cloned().collect(),
            max_threads: None,
            max_registers: None,
            min_ctas: 1,
            cluster: 1,
            exact_threads: false,
            seed: 0,
            files: self.files.to_vec(),
        };
        let mut body = Body { kernel, raw: vec![], wanted: vec![], found: vec![] };
        self.scopes.push(HashMap::new());
        self.want('(')?;
        while !self.eat(')') {
            if self.word()? != ".param" {
                return Err(".param expected".into());
            }
            let field = self.field(body.kernel.parameters.last().map_or(0, |f| f.offset + f.bytes))?;
            self.define(&field.name, PtxOperand::Parameter(field.offset))?;
            body.kernel.parameters.push(field);
            self.eat(',');
        }
        while !self.eat('{') {
            let directive = self.word()?;
            if directive == ".explicitcluster" {
                continue; // a launch must give a cluster's size, and .reqnctapercluster does
            }
            let first = self.number()?;
            let mut product = first;
            while self.eat(',') {
                product *= self.number()?;
            }
            match directive {
                ".maxntid" | ".reqntid" => {
                    body.kernel.max_threads = Some(product as u32);
                    body.kernel.exact_threads = directive == ".reqntid";
                }
                ".minnctapersm" => body.kernel.min_ctas = product.max(1) as u32,
                ".reqnctapercluster" if product == first && (1..=8).contains(&first) => {
                    body.kernel.cluster = first as u32;
                }
                ".maxnreg" => body.kernel.max_registers = Some(product as u32),
                other => return Err(format!("'{other}' is not modeled")),
            }
        }
        self.block(&mut body)?;
        self.scopes.pop();
        let kernel = self.finish(body)?;
        self.kernels.push(kernel);
        Ok(())
    }
    /// `.align 16 .b8 name[64]`: the next field at or after `end`, aligned.
    fn field(&mut self, end: usize) -> Decoded<Field> {
        let (mut align, mut size) = (0, None);
        loop {
            let word = self.word()?;
            if word == ".align" {
                align = self.number()? as usize;
            } else if let Some(name) = word.strip_prefix('.') {
                size = Some(bits(name)?.div_ceil(8));
            } else {
                let size = size.ok_or_else(|| format!("'{word}' has no type"))?;
                let mut bytes = size;
                if self.eat('[') {
                    bytes = if self.peek() == Some(Token::Mark(']')) { 0 } else { size * self.number()? as usize };
                    self.want(']')?;
                }
                return Ok(Field { name: word.into(), offset: end.next_multiple_of(align.max(size)), bytes });
            }
        }
    }
    fn block(&mut self, body: &mut Body<'a>) -> Decoded<()> {
        self.scopes.push(HashMap::new());
        let mut labels = HashMap::new();
        let first = body.wanted.len();
        while !self.eat('}') {
            if self.eat('{') {
                self.block(body)?;
                continue;
            }
            let place = self.tokens[self.at.min(self.tokens.len() - 1)].1;
            let mut guard = None;
            if self.eat('@') {
                let negated = self.eat('!');
                match self.operand(body)? {
                    PtxOperand::Register(register) => guard = Some((register, negated)),
                    other => return Err(format!("expected a predicate, found {other:?}")),
                }
            }
            let word = self.word()?;
            match word {
                ".reg" => self.registers(body)?,
                ".shared" => self.shared(body)?,
                ".pragma" => {
                    while !self.eat(';') {
                        self.next()?;
                    }
                }
                _ if self.eat(':') => {
                    if labels.insert(word, body.raw.len()).is_some() {
                        return Err(format!("label '{word}' is defined twice"));
                    }
                }
                _ => {
                    let operands = self.operands(body)?;
                    body.raw.push(RawInstruction { guard, mnemonic: word, operands, place });
                }
            }
        }
        // Labels are local to a block; unknown ones may belong to an enclosing block.
        for (name, found) in body.wanted.iter().zip(&mut body.found).skip(first) {
            *found = found.or(labels.get(name).copied());
        }
        self.scopes.pop();
        Ok(())
    }
    /// `.reg .u32 %a, %b<4>;`
    fn registers(&mut self, body: &mut Body<'a>) -> Decoded<()> {
        let word = self.word()?;
        bits(&word[1..])?;
        loop {
            let name = self.word()?;
            let names = if self.eat('<') {
                let n = self.number()?;
                self.want('>')?;
                (0..n).map(|k| format!("{name}{k}")).collect()
            } else {
                vec![name.to_string()]
            };
            for name in names {
                self.define(&name, PtxOperand::Register(body.kernel.registers.len()))?;
                body.kernel.registers.push(name);
            }
            if !self.eat(',') {
                return self.want(';');
            }
        }
    }
    fn shared(&mut self, body: &mut Body<'a>) -> Decoded<()> {
        if self.dynamic.is_some() {
            return Err("a kernel with an .extern .shared array cannot have other shared arrays".into());
        }
        let end = body.kernel.shared.last().map_or(0, |f| f.offset + f.bytes + RED_ZONE as usize);
        let field = self.field(end)?;
        self.define(&field.name, PtxOperand::Variable(SHARED_BASE + field.offset as u64))?;
        body.kernel.shared.push(field);
        self.want(';')
    }
    fn operands(&mut self, body: &mut Body<'a>) -> Decoded<Vec<PtxOperand>> {
        let mut operands = vec![];
        while !self.eat(';') {
            let operand = self.operand(body)?;
            if self.eat('|') {
                // `%value|%valid`
                operands.push(PtxOperand::List(vec![operand, self.operand(body)?]));
            } else {
                operands.push(operand);
            }
            if !self.eat(',') {
                self.want(';')?;
                break;
            }
        }
        Ok(operands)
    }
    fn operand(&mut self, body: &mut Body<'a>) -> Decoded<PtxOperand> {
        match self.next()? {
            Token::Mark('{') => {
                let mut list = vec![];
                while !self.eat('}') {
                    list.push(self.operand(body)?);
                    self.eat(',');
                }
                Ok(PtxOperand::List(list))
            }
            Token::Mark('[') => {
                let base = self.operand(body)?;
                if self.eat(',') {
                    let PtxOperand::List(at) = self.operand(body)? else { return Err("{coordinates} expected".into()) };
                    self.want(']')?;
                    return Ok(PtxOperand::Tensor(Box::new(base), at));
                }
                let mut offset = 0i64;
                while !self.eat(']') {
                    let sign = if self.eat('-') { -1 } else { 1 };
                    self.eat('+');
                    let sign = if self.eat('-') { -1 } else { sign };
                    offset += sign * self.number()? as i64;
                }
                Ok(PtxOperand::Memory(Box::new(base), offset))
            }
            Token::Mark('-') => Ok(PtxOperand::Immediate((self.number()? as i64).wrapping_neg() as u64)),
            Token::Mark('!') => match self.operand(body)? {
                PtxOperand::Register(register) => Ok(PtxOperand::Not(register)),
                other => Err(format!("'!' before {other:?}")),
            },
            Token::Number(number) => Ok(PtxOperand::Immediate(number)),
            Token::Decimal(text) => Err(bad(text)),
            Token::Word(name) => self.name(name, body),
            other => Err(format!("expected an operand, found {other:?}")),
        }
    }
    fn name(&mut self, name: &'a str, body: &mut Body<'a>) -> Decoded<PtxOperand> {
        if let Some(operand) = self.scopes.iter().rev().find_map(|scope| scope.get(name)) {
            return Ok(operand.clone());
        }
        if name == "_" {
            return Ok(PtxOperand::Nothing);
        }
        if name.starts_with('%') {
            return special(name).map(PtxOperand::Special).ok_or_else(|| format!("undeclared register '{name}'"));
        }
        body.wanted.push(name);
        body.found.push(None);
        Ok(PtxOperand::Label(body.wanted.len() - 1))
    }
    fn finish(&mut self, body: Body<'a>) -> Decoded<PtxKernel> {
        let mut kernel = body.kernel;
        for mut raw in body.raw {
            self.blame = Some(raw.place);
            for operand in &mut raw.operands {
                if let PtxOperand::Label(label) = operand {
                    let name = body.wanted[*label];
                    *label = body.found[*label].ok_or_else(|| format!("unknown name '{name}'"))?;
                }
            }
            let op = decode(raw.mnemonic, &raw.operands)?;
            kernel.instructions.push(Instruction { guard: raw.guard, op, place: raw.place });
        }
        self.blame = None;
        match kernel.instructions.len() {
            ..=MOST_INSTRUCTIONS => Ok(kernel),
            more => Err(format!("{more} instructions, and at most {MOST_INSTRUCTIONS} can be told apart")),
        }
    }
}

fn bits(name: &str) -> Decoded<usize> {
    match name {
        "pred" => Ok(1),
        "b8" | "u8" | "s8" => Ok(8),
        "b16" | "u16" | "s16" | "f16" | "bf16" => Ok(16),
        "b32" | "u32" | "s32" | "f32" | "f16x2" | "bf16x2" => Ok(32),
        "b64" | "u64" | "s64" | "f64" => Ok(64),
        other => Err(format!("type '.{other}' is not modeled")),
    }
}

fn special(name: &str) -> Option<SpecialRegister> {
    let (name, axis) = name.split_once('.').unwrap_or((name, ""));
    let axis = ["x", "y", "z"].iter().position(|a| *a == axis);
    Some(match (name, axis) {
        ("%tid", Some(axis)) => SpecialRegister::Tid(axis),
        ("%ntid", Some(axis)) => SpecialRegister::Ntid(axis),
        ("%ctaid", Some(axis)) => SpecialRegister::Ctaid(axis),
        ("%nctaid", Some(axis)) => SpecialRegister::Nctaid(axis),
        ("%laneid", None) => SpecialRegister::Lane,
        ("%warpid", None) => SpecialRegister::Warp,
        ("%cluster_ctarank", None) => SpecialRegister::Rank,
        ("%cluster_nctarank", None) => SpecialRegister::Ranks,
        _ => return None,
    })
}
