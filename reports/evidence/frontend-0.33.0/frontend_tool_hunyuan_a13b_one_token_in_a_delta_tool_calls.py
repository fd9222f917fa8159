"""vLLM 0.33.0, tool hunyuan_a13b, one token in a delta: other tool calls than without streaming. It needs no model."""
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser import ParserManager
DELTAS = [['Hi'], ['<'], ['tool_calls'], ['>'], ['[{"'], ['name'], ['":'], [' "'], ['save_note'], ['",'],
 [' "'], ['arguments'], ['":'], [' {}}]'], ['\n'], ['<'], ['/'], ['tool_calls'], ['>'],
 ['<eos>']]
TOKENS = []
TOOLS = {'save_note': {}}
alphabet = pre_tokenizers.ByteLevel.alphabet()
bpe = Tokenizer(models.BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
tokenizer, tokens = PreTrainedTokenizerFast(tokenizer_object=bpe), TOKENS + sum(DELTAS, [])
tokenizer.add_tokens([AddedToken(token, normalized=False) for token in tokens])
ids = tokenizer.convert_tokens_to_ids
kind = ParserManager.get_parser('hunyuan_a13b', None, enable_auto_tools=True)
tools = [{"type": "function", "function": {"name": name, "parameters": {
    "type": "object", "properties": keys}}} for name, keys in TOOLS.items()]
user = {"role": "user", "content": "a"}
request = ChatCompletionRequest(model="m", messages=[user], tools=tools)
whole, stream, prompt = kind(tokenizer, request.tools), kind(tokenizer, request.tools), ['a']
request = stream.adjust_request(whole.adjust_request(request))
texts = ["".join(delta).removesuffix('<eos>') for delta in DELTAS]
print("whole:", whole.parse("".join(texts), request, True, ids(sum(DELTAS, []))))
for text, delta in zip(texts, DELTAS):
    last = delta is DELTAS[-1]
    print(stream.parse_delta(text, ids(delta), request, ids(prompt), finished=last))
