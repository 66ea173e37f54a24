//! Where answers begin and end in a rendered conversation, and which of them have a loss. Never looks at other fields.
use super::fields::{THINKING, TOOLS, dropped, format, row, say, seen, turns};
use super::sft::{make, recipe};
use super::*;
use flatshard::data::{ChatTemplate, Drop, PairKeys, Preferences, TokenizedRow};
use serde_json::{Value, json};

/// An answer of JSON is one text, however many elements its list has, unless these are messages.
#[test]
fn answers_that_are_lists_of_json_are_text() {
    for answer in [r#"["Bob", "Al"]"#, "[1, 2, 3]", r#"[{"name": "f", "arguments": {}}, {"name": "g"}]"#] {
        let rows = [
            json!({"system": "Extract.", "prompt": "Bob and Al", "completion": answer}),
            json!({"messages": [say("system", "Extract."), say("user", "Bob and Al"), say("assistant", answer)]}),
        ];
        let [plain, listed] = rows.map(|row| seen(format(TOOLS), &row));
        assert_eq!(plain, listed, "{answer}");
        assert!(plain.1.len() == 1 && plain.1[0].starts_with(answer), "{plain:?}");
        let named = Format { input_key: Some("q".into()), output_key: Some("a".into()), ..format(TOOLS) };
        let (made, _) = row(named, &json!({"q": "Bob and Al", "a": answer}));
        assert!(made.unread.is_empty() && made.labels.iter().any(|&label| label >= 0), "{:?}", made.unread);
    }
    let messages = json!([say("assistant", "a"), say("user", "r"), say("assistant", "b")]).to_string();
    let (_, loss) = seen(format(TOOLS), &json!({"prompt": "q", "completion": messages}));
    assert!(loss.concat().contains('a') && loss.concat().contains('b'), "{loss:?}");
}

/// The start of an answer that a template adds to every conversation, asked for or not, is no part of an answer.
#[test]
fn what_a_template_always_adds_is_not_learned() {
    // The first revision of Llama 3's.
    let llama3 = "{% for m in messages %}{% set content = '<|start|>' + m['role'] + '<|stop|>\n\n' + m['content'] | trim + \
                  '<|eot|>' %}{% if loop.index0 == 0 %}{% set content = '<|begin|>' + content %}{% endif %}{{ content }}\
                  {% endfor %}{{ '<|start|>assistant<|stop|>\n\n' }}";
    let talk = json!([say("user", "q"), say("assistant", "a"), say("user", "r"), say("assistant", "b")]);
    let from = json!({ "messages": talk });
    let (text, loss) = seen(turns(llama3), &from);
    assert!(text.ends_with("<|start|>assistant<|stop|>\n\nb<|eot|>"), "{text}");
    assert_eq!(loss, ["a<|eot|>", "b<|eot|>"]);
    assert_eq!(seen(format(llama3), &from).1, ["b<|eot|>"]);
    let chat = ChatTemplate::new(llama3, ("<s>", "</s>")).unwrap();
    assert_eq!(chat.end_of_turn(), Some("<|eot|>"));
    let pair =
        json!({"prompt": [say("user", "q")], "chosen": [say("assistant", "a")], "rejected": [say("assistant", "b")]});
    let judged = Format { preferences: Some(Preferences::Pairs(PairKeys::default())), ..format(llama3) };
    let text = Tokenizer::Bytes.decode(&row(judged, &pair).0.ids);
    assert!(text.contains("a<|eot|><|begin|>") && text.ends_with("b<|eot|>"), "{text}");
}

/// Messages of a role that a template does not know are named, and a call that it does not know is no answer.
#[test]
fn what_a_template_leaves_out_is_named_and_not_answered() {
    let known = "{% for m in messages %}{% if m.role in ['user', 'assistant', 'system'] %}<|{{ m.role }}|>{{ m.content }}\
                 <|end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}";
    let talk = json!([say("developer", "be nice"), say("user", "q"), say("assistant", "a")]);
    let (made, _) = row(format(known), &json!({ "messages": talk }));
    assert_eq!(made.unread, ["developer messages (left out by the chat template)"]);
    // So too where an answer repeats what is left out.
    let quoted = json!({"messages": [say("user", "hi"), say("developer", "yes"), say("assistant", "yes, yes")]});
    assert_eq!(row(format(known), &quoted).0.unread, ["developer messages (left out by the chat template)"]);
    let twice = json!({"messages": [say("user", "hi"), say("developer", "yes"), say("developer", "no"), say("assistant", "yes, no")]});
    assert_eq!(row(format(known), &twice).0.unread, ["developer messages (left out by the chat template)"]);
    assert!(row(format(TOOLS), &twice).0.unread.is_empty());
    assert!(row(format(TOOLS), &json!({ "messages": talk })).0.unread.is_empty());
    let first = "{% if messages[0].role == 'system' %}<|system|>{{ messages[0].content }}<|end|>\n{% endif %}\
                 {% for m in messages %}{% if m.role != 'system' %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endif %}\
                 {% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}";
    let later =
        json!({"messages": [say("system", "one"), say("user", "q"), say("system", "new"), say("assistant", "a")]});
    assert_eq!(row(format(first), &later).0.unread, ["some system messages (left out by the chat template)"]);
    assert!(row(format(TOOLS), &later).0.unread.is_empty());
    // A text in other words is not left out.
    let loud = known.replace("m.content", "m.content | upper");
    assert!(row(format(&loud), &json!({"messages": [talk[1], talk[2]]})).0.unread.is_empty());
    let call = json!({"role": "assistant", "content": "", "function_call": {"name": "f"}});
    let calls = json!([say("user", "q"), call, say("function", "RESULT"), say("assistant", "a")]);
    let from = json!({ "messages": calls });
    assert_eq!(seen(turns(known), &from).1, ["a<|end|>"]);
    let named = row(turns(known), &from).0.unread;
    assert!(named.contains(&"function messages (left out by the chat template)".to_string()), "{named:?}");
    assert_eq!(dropped(format(known), json!({"messages": [say("user", "q"), call]})), Drop::NoAnswer);
}

/// A role that the template names is known, as OLMo 3's `environment` and its calls in a field of their own.
#[test]
fn roles_that_a_template_names_are_known() {
    let olmo = "{% for m in messages %}{% if m.role == 'environment' %}[{{ m.content }}]{% else %}<|{{ m.role }}|>\
                {{ m.content or m.function_calls }}<|end|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}";
    let call = json!({"role": "assistant", "content": null, "function_calls": "f()"});
    let from = json!({"messages": [say("user", "q"), call, say("environment", "r"), say("assistant", "a")]});
    let expected = "<|user|>q<|end|><|assistant|>f()<|end|>[r]<|assistant|>a<|end|>";
    assert_eq!(seen(turns(olmo), &from), (expected.into(), vec!["f()<|end|>".into(), "a<|end|>".into()]));
    let fault = recipe(turns(TOOLS)).row(from.as_object().unwrap(), &mut TokenizedRow::default()).unwrap_err();
    assert!(fault.contains("message 2 with role \"environment\"; the chat template does not name it"), "{fault}");
}

/// gpt-oss ends the last answer, others and calls with a token each. The part that two ends share ends an answer, and
/// the whole token with it; the tokens here are bytes.
#[test]
fn answers_of_a_template_with_several_ends_are_found() {
    let ends = "{% for m in messages %}<|start|>{{ m.role }}{% if m.tool_calls %} to={{ m.tool_calls[0].function.name }}<|call|>\
                {% elif m.role == 'assistant' %}<|message|>{{ m.content }}{{ '<|return|>' if loop.last else '<|end|>' }}\
                {% else %}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}\
                {% if add_generation_prompt %}<|start|>assistant{% endif %}";
    let call =
        json!({"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]});
    let talk = json!([
        say("user", "q"),
        call,
        say("tool", "1"),
        say("assistant", "one"),
        say("user", "and"),
        say("assistant", "two")
    ]);
    let loss = seen(turns(ends), &json!({ "messages": talk })).1;
    assert_eq!(loss, [" to=f<|call|>", "<|message|>one<|", "<|message|>two<|return|>"]);
}

/// Without --multiturn, answers before the last one are named.
#[test]
fn answers_without_loss_are_named() {
    let talk = |answers: usize| {
        let turn = |i: usize| [say("user", "q"), say("assistant", &format!("a{i}"))];
        json!({"messages": (0..answers).flat_map(turn).collect::<Vec<_>>()})
    };
    let earlier = "answers before the last one (--multiturn trains on them)";
    assert_eq!(row(format(TOOLS), &talk(2)).0.unread, [earlier]);
    assert!(row(format(TOOLS), &talk(1)).0.unread.is_empty() && row(turns(TOOLS), &talk(2)).0.unread.is_empty());
}

#[test]
fn answers_are_found_in_one_rendering_that_changes_them() {
    let call = json!([{"type": "function", "function": {"name": "mul", "arguments": {"a": 17}}}]);
    let talk = json!({"messages": [
        say("user", "What is 17 * 3?"),
        {"role": "assistant", "content": "<think>\nUse the tool.\n</think>\n\n", "tool_calls": call},
        say("tool", "51"),
        say("assistant", "<think>\nIt is 51.\n</think>\n\n17 * 3 is 51."),
        say("user", "And plus <|assistant|>1?"),
        say("assistant", "<think>\nEasy.\n</think>\n\n52."),
    ]});
    let (text, loss) = seen(turns(THINKING), &talk);
    assert_eq!(
        text,
        "<|user|>What is 17 * 3?<|end|>\n<|assistant|><call>mul</call><|end|>\n<|tool|>51<|end|>\n<|assistant|>17 * 3 is \
         51.<|end|>\n<|user|>And plus <|assistant|>1?<|end|>\n<|assistant|><think>\nEasy.\n</think>\n\n52.<|end|>"
    );
    assert_eq!(
        loss,
        ["<call>mul</call><|end|>\n", "17 * 3 is 51.<|end|>\n", "<think>\nEasy.\n</think>\n\n52.<|end|>"],
        "a message that spells the header of an answer is not one"
    );
    // Without multiturn, the last one.
    assert_eq!(seen(format(THINKING), &talk).1, ["<think>\nEasy.\n</think>\n\n52.<|end|>"]);
    // A template that prompts with the beginning of a thought has answers with and without one.
    let prompting = THINKING.replace("'<|assistant|>' }}{% endif", "'<|assistant|><think>\n' }}{% endif");
    let (_, loss) = seen(turns(&prompting), &talk);
    assert_eq!(loss[1..], ["17 * 3 is 51.<|end|>\n", "Easy.\n</think>\n\n52.<|end|>"]);
    assert_eq!(seen(format(&prompting), &talk).1, ["Easy.\n</think>\n\n52.<|end|>"]);
}

/// As GLM 4.5: an answer has no end, and earlier ones lose their thoughts. As Phi 3: the end of the last answer begins
/// like the next message.
#[test]
fn answers_without_an_end_of_their_own_are_found() {
    let glm = "{%- set ns = namespace(last=0) %}{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}\
        {% endif %}{% endfor %}{%- for m in messages %}{{- '<|' + m.role + '|>' }}{% if m.role == 'assistant' %}{{ '<think>' + (\
        m.reasoning_content or '' if loop.index0 > ns.last else '') + '</think>' }}{% endif %}{{- m.content }}{%- endfor %}\
        {%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}";
    let phi = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}{% if add_generation_prompt %}\
        <|assistant|>{% else %}<|endoftext|>{% endif %}";
    let thought = |text: &str| json!({"role": "assistant", "content": text, "reasoning_content": "t"});
    let talk = json!({"messages": [say("user", "a"), thought("b<|user"), say("tool", "c"), thought("d"), say("user", "e"), thought("f")]});
    assert_eq!(seen(turns(glm), &talk).1, ["<think></think>b<|user", "<think></think>d", "<think>t</think>f"]);
    assert_eq!(seen(format(glm), &talk).1, ["<think>t</think>f"]);
    assert_eq!(seen(turns(phi), &talk).1, ["b<|user<|end|>\n", "d<|end|>\n", "f<|end|>\n"]);
}

/// What asks for an answer may have more than the answer: as Gemma 4's, the thought that a call does not begin with; as
/// Apriel's, words that it may share with the answer; as GLM 4.7's, a mark that begins as another one.
#[test]
fn answers_begin_where_they_part_from_what_asks_for_them() {
    let gemma = "{% for m in messages %}{% if m.role == 'tool' %}<|tool_response>{{ m.content }}<tool_response|>\
        {% elif m.role == 'assistant' %}{% if loop.previtem.role != 'tool' %}<|turn>model\n{% endif %}{% if m.tool_calls %}\
        <|tool_call>{{ m.tool_calls[0].function.name }}<tool_call|>{% else %}{{ m.content }}<turn|>\n{% endif %}{% else %}\
        <|turn>{{ m.role }}\n{{ m.content }}<turn|>\n{% endif %}{% endfor %}\
        {% if add_generation_prompt and messages[-1].role != 'tool' %}<|turn>model\n<|channel>thought\n<channel|>{% endif %}";
    let call =
        json!({"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]});
    let talk = json!({"messages": [say("user", "q"), call, say("tool", "1"), say("assistant", "one"), say("user", "and"), call]});
    let loss = ["<|tool_call>f<tool_call|>", "one<turn|>\n", "<|tool_call>f<tool_call|>"];
    assert_eq!(seen(turns(gemma), &talk).1, loss);
    assert_eq!(seen(format(gemma), &talk).1, loss[2..]);
    let apriel = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}\n{% endfor %}\
        {% if add_generation_prompt %}<|assistant|>\nHere are my steps:\n{% endif %}";
    let glm = "{% for m in messages %}<|{{ m.role }}|>{{ '</think>' if m.role == 'assistant' else '' }}{{ m.content }}\
        {% endfor %}{% if add_generation_prompt %}<|assistant|><think>{% endif %}";
    let talk =
        json!({"messages": [say("user", "q"), say("assistant", "Hello"), say("user", "r"), say("assistant", "He")]});
    assert_eq!(seen(turns(apriel), &talk).1, ["Hello\n", "He"]);
    assert_eq!(seen(turns(glm), &talk).1, ["</think>Hello", "</think>He"]);
}

#[test]
fn both_ways_to_find_answers_agree() {
    let turn = |(role, content): &(&str, &str)| say(role, content);
    let all = [
        ("system", "s"),
        ("user", "a"),
        ("assistant", "Yes."),
        ("user", "b"),
        ("assistant", " No. "),
        ("user", "Yes."),
        ("assistant", "Yes."),
    ];
    let [all, talk] =
        [&all[..], &all[1..]].map(|turns| json!({"messages": turns.iter().map(turn).collect::<Vec<_>>()}));
    for name in ["chatml", "gemma3", "llama3", "mistral", "qwen2", "qwen3", "zephyr"] {
        let source = fs::read_to_string(tokens::golden("templates").join(format!("{name}.jinja"))).unwrap();
        // A frame cannot be found where the question is not rendered as it is: then the slow way is taken.
        let slow = format!(
            "{{% if messages[0].content == 'question-7c1e' %}}{{{{ raise_exception('no') }}}}{{% endif %}}{source}"
        );
        let (fast, slow) = (seen(turns(&source), &talk), seen(turns(&slow), &talk));
        assert_eq!(fast, slow, "{name}");
        assert_eq!(fast.1.len(), 3, "{name}");
        // Mistral's template renders the system message with the last question, so no beginning is like the whole.
        assert_eq!(seen(turns(&source), &all).1, fast.1, "{name}");
    }
}

#[test]
fn generation_blocks_say_what_has_a_loss() {
    let tags = "{% for m in messages %}<|{{ m.role }}|>\n{% if m.role == 'assistant' and m.context is not defined %}Note. \
                {% generation %}{{ m.content }}<|end|>{% endgeneration %}{% else %}{{ m.content }}<|end|>{% endif %}\n\
                {% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}";
    let talk = json!({"messages": [
        say("user", "Peru?"), {"role": "assistant", "content": "Quito.", "context": true},
        say("user", "Check."), say("assistant", "Lima."),
    ]});
    assert_eq!(seen(turns(tags), &talk).1, ["Lima.<|end|>"]);
    assert_eq!(seen(format(tags), &talk).1, ["Lima.<|end|>"]);
    let two = json!({"messages": [say("user", "a"), say("assistant", "b"), say("user", "c"), say("assistant", "d")]});
    assert_eq!(seen(turns(tags), &two).1, ["b<|end|>", "d<|end|>"]);
    assert_eq!(seen(format(tags), &two).1, ["d<|end|>"]);
    // A block with the answer's header, and one that begins before the end of what prompts an answer.
    let head = "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}<a>{{ m.content }}.{% endgeneration %}\
                {% else %}<q>{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}";
    assert_eq!(seen(format(head), &two).1, ["<a>d."]);
    // As transformers' mask has it, newlines that a block ends with are a part of it, after the last answer too.
    for newlines in ["\\n", "\\n\\n"] {
        let tail = "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|end|>N' \
                    }}{% endgeneration %}{% else %}{{ m.content }}<|end|>{% endif %}{% endfor %}";
        let end = newlines.replace("\\n", "\n");
        let [b, d] = ["b", "d"].map(|text| format!("{text}<|end|>{end}"));
        assert_eq!(seen(turns(&tail.replace('N', newlines)), &two).1, [b, d]);
    }
    // Tags in a comment are none.
    assert_eq!(seen(turns(&format!("{{# {{% generation %}} #}}{TOOLS}")), &two).1.len(), 2);
    // Switches of messages come first.
    let mut switched = two.clone();
    switched["messages"][3]["weight"] = json!(0);
    assert_eq!(seen(turns(tags), &switched).1, ["b<|end|>"]);
    let none = json!({"messages": [say("user", "a"), {"role": "assistant", "content": "b", "context": true}]});
    assert_eq!(dropped(turns(tags), none), Drop::NoLoss);
}

#[test]
fn switches_of_messages_turn_their_loss_on_and_off() {
    let talk = |key: &str, values: [Value; 3]| {
        let [a, b, c] = values.map(|value| json!({"role": "assistant", "content": "x", key: value}));
        json!({"messages": [say("user", "1"), a, say("user", "2"), b, say("user", "3"), c]})
    };
    let count = |format: Format, row: Value| seen(format, &row).1.len();
    let (on, off, null) = (json!(true), json!(false), json!(null));
    for key in ["weight", "train", "training", "loss"] {
        assert_eq!(count(turns(TOOLS), talk(key, [off.clone(), null.clone(), json!(1)])), 2, "{key}");
        assert_eq!(count(format(TOOLS), talk(key, [on.clone(), null.clone(), null.clone()])), 2, "{key}");
        assert_eq!(count(format(TOOLS), talk(key, [json!(1), off.clone(), json!(0)])), 1, "{key}");
        assert_eq!(dropped(turns(TOOLS), talk(key, [off.clone(), off.clone(), json!(0.0)])), Drop::NoLoss, "{key}");
        let fault = make(format(TOOLS), talk(key, [json!(0.5), off.clone(), on.clone()])).unwrap_err();
        assert!(fault.contains(&format!("message 1 with {key} 0.5")), "{fault}");
    }
    let both = json!({"role": "assistant", "content": "x", "weight": 1, "train": false});
    let fault = make(format(TOOLS), json!({"messages": [say("user", "1"), both]})).unwrap_err();
    assert!(fault.contains("message 1 whose weight and train contradict"), "{fault}");
    let user = json!({"role": "user", "content": "1", "training": true});
    let (made, _) = row(format(TOOLS), &json!({"messages": [user, say("assistant", "x")]}));
    assert_eq!(made.unread, ["`training` of messages that are not an assistant's (they have no loss)"]);
    // Messages of ShareGPT too.
    let from = json!({"conversations": [
        {"from": "human", "value": "1"}, {"from": "gpt", "value": "a", "weight": 0},
        {"from": "human", "value": "2"}, {"from": "gpt", "value": "b"},
    ]});
    assert_eq!(seen(turns(TOOLS), &from).1, ["b<|end|>"]);
}

/// Lists without roles have an order: LIMA's and UltraChat's texts, and the exchanges of XTuner and Capybara.
#[test]
fn messages_without_roles_are_those_of_user_and_assistant_in_turn() {
    let named = || Format { input_key: Some("talk".into()), ..turns(TOOLS) };
    let texts = json!({"talk": ["q", "a", "r", "b"]});
    let expected = "<|user|>q<|end|>\n<|assistant|>a<|end|>\n<|user|>r<|end|>\n<|assistant|>b<|end|>";
    assert_eq!(seen(named(), &texts), (expected.into(), ["a<|end|>\n", "b<|end|>"].map(String::from).into()));
    assert_eq!(seen(turns(TOOLS), &json!({"conversations": texts["talk"]})).0, expected);
    let both = json!({"talk": [{"input": "q", "output": "a"}, {"input": "r", "output": "b"}]});
    assert_eq!(seen(named(), &both).0, expected);
    assert!(row(named(), &both).0.unread.is_empty());
    let xtuner = json!({"talk": [
        {"system": "s", "input": "q", "output": "a", "output_with_loss": false}, {"system": "", "input": "r", "output": "b"},
    ]});
    assert_eq!(seen(named(), &xtuner), (format!("<|system|>s<|end|>\n{expected}"), vec!["b<|end|>".into()]));
    let mixed = json!({"talk": ["q", {"role": "assistant", "content": "a"}]});
    let fault = recipe(named()).row(mixed.as_object().unwrap(), &mut TokenizedRow::default()).unwrap_err();
    assert!(fault.contains("a message 0 that is not an object"), "{fault}");
}

/// Next to messages, a prompt and an answer in text are a part of them, where rows are said to be conversations.
#[test]
fn messages_are_read_before_a_part_of_them_as_text() {
    let talk = [say("user", "q"), say("assistant", "a"), say("user", "r"), say("assistant", "b")];
    let from = json!({"prompt": "q", "completion": "a", "messages": talk});
    assert_eq!(seen(turns(TOOLS), &from).1, ["a<|end|>\n", "b<|end|>"]);
    assert_eq!(row(turns(TOOLS), &from).0.unread, ["`prompt`", "`completion`"]);
    let plain = Format { apply_chat_template: false, ..format(TOOLS) };
    assert!(seen(plain, &from).0.starts_with("qa"));
    // As messages they are TRL's, which come first.
    let from = json!({"prompt": [talk[0]], "completion": [talk[1]], "messages": talk});
    assert_eq!(seen(turns(TOOLS), &from).1, ["a<|end|>"]);
}

/// What keeps an answer out may be an empty list of calls.
#[test]
fn an_empty_list_of_calls_is_named_where_it_hides_an_answer() {
    let template = "{% for m in messages %}{% if m.tool_calls is defined %}[call]{% else %}<|{{ m.role }}|>{{ m.content }}\
                    {% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}";
    let answer = json!({"role": "assistant", "content": "a", "tool_calls": []});
    let from = json!({"messages": [say("user", "q"), answer]});
    let fault = recipe(format(template)).row(from.as_object().unwrap(), &mut TokenizedRow::default()).unwrap_err();
    assert!(fault.contains("Message 1 has `tool_calls`") && fault.contains("remove it"), "{fault}");
    assert!(recipe(turns(template)).row(from.as_object().unwrap(), &mut TokenizedRow::default()).is_err());
}
