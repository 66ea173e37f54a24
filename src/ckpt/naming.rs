//! How the files of a model name the tensors of its text model. Never reads a file.

/// How the files of a model name the tensors of its text model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Naming {
    /// The names of the text model's own class: `model.`, `lm_head.`
    #[default]
    Plain,
    /// The names of the modules of a class with a vision tower since transformers 4.52.
    Within,
    /// Their names before that; transformers still writes most models so.
    Around,
    /// The names of the modules of Idefics and SmolVLM.
    TextModel,
    /// The names under which GPT-NeoX is published and written by transformers, whose class has `lm_head.`.
    EmbedOut,
    /// The names under which Nemotron-H is published and written by transformers, whose class has `model.`.
    Backbone,
}

/// The names of modules with a vision tower, for messages.
const VISUAL: [&str; 16] = [
    "high_res_vision",
    "merger.",
    "vision_tokenizer.",
    "audio_tokenizer.",
    "aligner.",
    "image_tower.",
    "video_tower.",
    "vision_projector.",
    "vision_tower.",
    "vision_model.",
    "visual.",
    "connector.",
    "multi_modal_projector.",
    "embed_vision.",
    "audio_tower.",
    "embed_audio.",
];

impl Naming {
    const ALL: [Naming; 6] =
        [Naming::Within, Naming::Around, Naming::TextModel, Naming::Backbone, Naming::EmbedOut, Naming::Plain];

    /// The beginnings of names: ours, and the file's.
    fn prefixes(self) -> [(&'static str, &'static str); 2] {
        match self {
            Naming::Plain => [("model.", "model."), ("lm_head.", "lm_head.")],
            Naming::Within => [("model.", "model.language_model."), ("lm_head.", "lm_head.")],
            Naming::TextModel => [("model.", "model.text_model."), ("lm_head.", "lm_head.")],
            Naming::Backbone => [("model.", "backbone."), ("lm_head.", "lm_head.")],
            Naming::EmbedOut => [("gpt_neox.", "gpt_neox."), ("lm_head.", "embed_out.")],
            Naming::Around => [("model.", "language_model.model."), ("lm_head.", "language_model.lm_head.")],
        }
    }
    /// That of the files of a model with these tensors that has no vision tower.
    pub fn of_class<'a>(mut own: impl Iterator<Item = &'a str>) -> Naming {
        let of = |name: &str| match name {
            "model.norm_f.weight" => Some(Naming::Backbone),
            "gpt_neox.final_layer_norm.weight" => Some(Naming::EmbedOut),
            _ => None,
        };
        own.find_map(of).unwrap_or_default()
    }
    /// That of a model whose files have the tensors `names`.
    pub fn of<'a>(names: impl Iterator<Item = &'a String> + Clone) -> Naming {
        let has = |naming: &Naming| names.clone().any(|name| name.starts_with(naming.prefixes()[0].1));
        Naming::ALL.into_iter().find(has).unwrap_or_default()
    }
    /// The name in files.
    pub fn file_name(self, name: &str) -> String {
        let renamed = |(ours, theirs): (&str, &str)| Some(format!("{theirs}{}", name.strip_prefix(ours)?));
        self.prefixes().into_iter().find_map(renamed).unwrap_or_else(|| name.into())
    }
    /// Whether a tensor of this name belongs to the text model.
    pub fn is_text(self, name: &str) -> bool {
        self.prefixes().iter().any(|(_, theirs)| name.starts_with(theirs))
    }
    /// How PEFT names the modules of a model whose files are named so.
    pub fn of_modules(self) -> Naming {
        if self == Naming::TextModel { self } else { Naming::Within }
    }
    /// Our name of a tensor or module that a file has under any of the namings.
    pub fn text_name(name: &str) -> String {
        let ours = |(ours, theirs): (&str, &str)| Some(format!("{ours}{}", name.strip_prefix(theirs)?));
        Naming::ALL.iter().flat_map(|naming| naming.prefixes()).find_map(ours).unwrap_or_else(|| name.into())
    }
}

/// Whether the name is of a module that a vision-language model has next to its text model.
pub(super) fn is_visual(name: &str) -> bool {
    VISUAL.iter().any(|module| name.contains(module))
}
