"""Networks for images, in the style of torchvision and timm."""

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from published.data import images, masks
from published.entry import Published


class VGG(nn.Module):
    """Features in one `nn.Sequential` with in-place ReLUs, then a classifier with Dropout."""

    def __init__(
        self, cfg: Sequence[int | str] = (8, "M", 16, "M"), num_classes: int = 3, dropout: float = 0.5
    ) -> None:
        super().__init__()
        self.features = self._make_layers(cfg)
        self.avgpool = nn.AdaptiveAvgPool2d((2, 2))
        self.classifier = nn.Sequential(
            nn.Linear(16 * 2 * 2, 32),
            nn.ReLU(True),
            nn.Dropout(p=dropout),
            nn.Linear(32, 32),
            nn.ReLU(True),
            nn.Dropout(p=dropout),
            nn.Linear(32, num_classes),
        )
        for m in self.modules():
            if isinstance(m, nn.Conv2d):
                nn.init.kaiming_normal_(m.weight, mode="fan_out", nonlinearity="relu")
                nn.init.constant_(m.bias, 0)
            elif isinstance(m, nn.Linear):
                nn.init.normal_(m.weight, 0, 0.1)
                nn.init.constant_(m.bias, 0)

    @staticmethod
    def _make_layers(cfg: Sequence[int | str]) -> nn.Sequential:
        layers: list[nn.Module] = []
        in_channels = 3
        for v in cfg:
            if v == "M":
                layers += [nn.MaxPool2d(kernel_size=2, stride=2)]
            else:
                layers += [nn.Conv2d(in_channels, v, kernel_size=3, padding=1), nn.ReLU(inplace=True)]
                in_channels = v
        return nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(x)
        x = self.avgpool(x)
        x = torch.flatten(x, 1)
        return self.classifier(x)


def conv3x3(in_planes: int, out_planes: int, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    """3x3 convolution with padding."""
    return nn.Conv2d(in_planes, out_planes, 3, stride=stride, padding=1, groups=groups, bias=False)


class BasicBlock(nn.Module):
    """Two convolutions, a shortcut, and one in-place ReLU that is used twice."""

    expansion = 1

    def __init__(self, inplanes: int, planes: int, stride: int, groups: int, downsample: nn.Module | None) -> None:
        super().__init__()
        self.conv1 = conv3x3(inplanes, planes, stride)
        self.bn1 = nn.BatchNorm2d(planes)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = conv3x3(planes, planes)
        self.bn2 = nn.BatchNorm2d(planes)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class Bottleneck(nn.Module):
    """1x1, 3x3 with groups, 1x1."""

    expansion = 4

    def __init__(self, inplanes: int, planes: int, stride: int, groups: int, downsample: nn.Module | None) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inplanes, planes, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = conv3x3(planes, planes, stride, groups)
        self.bn2 = nn.BatchNorm2d(planes)
        self.conv3 = nn.Conv2d(planes, planes * self.expansion, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(planes * self.expansion)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    """As torchvision's, with a stem of 3x3."""

    def __init__(self, block: type, layers: Sequence[int], groups: int = 1, num_classes: int = 3) -> None:
        super().__init__()
        self.inplanes, self.groups = 8, groups
        self.conv1 = conv3x3(3, self.inplanes)
        self.bn1 = nn.BatchNorm2d(self.inplanes)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
        self.layer1 = self._make_layer(block, 8, layers[0])
        self.layer2 = self._make_layer(block, 16, layers[1], stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(16 * block.expansion, num_classes)
        for m in self.modules():
            if isinstance(m, nn.Conv2d):
                nn.init.kaiming_normal_(m.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(m, nn.BatchNorm2d):
                nn.init.constant_(m.weight, 1)
                nn.init.constant_(m.bias, 0)

    def _make_layer(self, block: type, planes: int, blocks: int, stride: int = 1) -> nn.Sequential:
        downsample = None
        if stride != 1 or self.inplanes != planes * block.expansion:
            downsample = nn.Sequential(
                nn.Conv2d(self.inplanes, planes * block.expansion, 1, stride=stride, bias=False),
                nn.BatchNorm2d(planes * block.expansion),
            )
        layers = [block(self.inplanes, planes, stride, self.groups, downsample)]
        self.inplanes = planes * block.expansion
        layers += [block(self.inplanes, planes, 1, self.groups, None) for _ in range(1, blocks)]
        return nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer2(self.layer1(x))
        x = torch.flatten(self.avgpool(x), 1)
        return self.fc(x)


class DenseLayer(nn.Module):
    """Takes the list of all earlier features."""

    def __init__(self, num_input_features: int, growth_rate: int, drop_rate: float) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(num_input_features)
        self.relu1 = nn.ReLU(inplace=True)
        self.conv1 = nn.Conv2d(num_input_features, growth_rate, kernel_size=3, padding=1, bias=False)
        self.drop_rate = float(drop_rate)

    def forward(self, features: list[Tensor]) -> Tensor:
        new_features = self.conv1(self.relu1(self.norm1(torch.cat(features, 1))))
        if self.drop_rate > 0:
            new_features = F.dropout(new_features, p=self.drop_rate, training=self.training)
        return new_features


class DenseBlock(nn.ModuleDict):
    """A dictionary of layers that is called."""

    def __init__(self, num_layers: int, num_input_features: int, growth_rate: int, drop_rate: float) -> None:
        super().__init__()
        for i in range(num_layers):
            self.add_module(
                f"denselayer{i + 1}", DenseLayer(num_input_features + i * growth_rate, growth_rate, drop_rate)
            )

    def forward(self, init_features: Tensor) -> Tensor:
        features = [init_features]
        for _, layer in self.items():
            features.append(layer(features))
        return torch.cat(features, 1)


class DenseNet(nn.Module):
    """Features that are added with names."""

    def __init__(self, growth_rate: int = 4, drop_rate: float = 0.1, num_classes: int = 3) -> None:
        super().__init__()
        self.features = nn.Sequential()
        self.features.add_module("conv0", conv3x3(3, 8))
        self.features.add_module("denseblock1", DenseBlock(2, 8, growth_rate, drop_rate))
        transition = nn.Sequential(nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.Conv2d(16, 8, 1), nn.AvgPool2d(2, 2))
        self.features.add_module("transition1", transition)
        self.features.add_module("denseblock2", DenseBlock(2, 8, growth_rate, drop_rate))
        self.features.add_module("norm5", nn.BatchNorm2d(16))
        self.classifier = nn.Linear(16, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.features(x), inplace=True)
        out = torch.flatten(F.adaptive_avg_pool2d(out, (1, 1)), 1)
        return self.classifier(out)


class SqueezeExcitation(nn.Module):
    """Channels are scaled by a function of their means."""

    def __init__(self, channels: int, squeezed: int, scale: type[nn.Module] = nn.Hardsigmoid) -> None:
        super().__init__()
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc1, self.fc2 = nn.Conv2d(channels, squeezed, 1), nn.Conv2d(squeezed, channels, 1)
        self.activation, self.scale_activation = nn.ReLU(inplace=True), scale()

    def forward(self, x: Tensor) -> Tensor:
        scale = self.activation(self.fc1(self.avgpool(x)))
        return self.scale_activation(self.fc2(scale)) * x


class MobileNetV3(nn.Module):
    """In-place Hardswish behind the slot, squeeze and excitation, BatchNorm with its own eps and momentum."""

    def __init__(self, num_classes: int = 3) -> None:
        super().__init__()
        norm_layer = partial(nn.BatchNorm2d, eps=0.001, momentum=0.01)
        self.stem = nn.Sequential(conv3x3(3, 8, 2), norm_layer(8), nn.Hardswish(inplace=True))
        self.depthwise = nn.Sequential(conv3x3(8, 8, groups=8), norm_layer(8))
        self.act = nn.Hardswish(inplace=True)
        self.se = SqueezeExcitation(8, 4)
        self.project = nn.Sequential(nn.Conv2d(8, 16, 1, bias=False), norm_layer(16))
        self.head = nn.Sequential(
            nn.Linear(16, 16), nn.Hardswish(inplace=True), nn.Dropout(p=0.2, inplace=True), nn.Linear(16, num_classes)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.project(self.se(self.act(self.depthwise(self.stem(x)))))
        return self.head(x.mean([2, 3]))


class StochasticDepth(nn.Module):
    """Drops the branch of whole examples, with random numbers that are drawn in forward."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0.0:
            return x
        survival_rate = 1.0 - self.p
        noise = torch.empty([x.shape[0]] + [1] * (x.ndim - 1), dtype=x.dtype, device=x.device)
        noise = noise.bernoulli_(survival_rate).div_(survival_rate)
        return x * noise


class MBConv(nn.Module):
    """Of EfficientNet."""

    def __init__(self, channels: int, expand: int, drop: float) -> None:
        super().__init__()
        hidden = channels * expand
        self.block = nn.Sequential(
            nn.Sequential(nn.Conv2d(channels, hidden, 1, bias=False), nn.BatchNorm2d(hidden), nn.SiLU(inplace=True)),
            nn.Sequential(conv3x3(hidden, hidden, groups=hidden), nn.BatchNorm2d(hidden), nn.SiLU(inplace=True)),
            SqueezeExcitation(hidden, 2, nn.Sigmoid),
            nn.Sequential(nn.Conv2d(hidden, channels, 1, bias=False), nn.BatchNorm2d(channels)),
        )
        self.stochastic_depth = StochasticDepth(drop)

    def forward(self, x: Tensor) -> Tensor:
        result = self.stochastic_depth(self.block(x))
        result += x
        return result


class EfficientNet(nn.Module):
    """MBConv blocks whose probability of being dropped rises with depth."""

    def __init__(self, num_classes: int = 3) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Sequential(conv3x3(3, 8, 2), nn.BatchNorm2d(8), nn.SiLU(inplace=True)),
            *[MBConv(8, 2, 0.2 * i / 2) for i in range(1, 3)],
        )
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Sequential(nn.Dropout(p=0.2, inplace=True), nn.Linear(8, num_classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(torch.flatten(self.avgpool(self.features(x)), 1))


class LayerNorm2d(nn.LayerNorm):
    """Over the channels of [B, C, H, W]."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(0, 2, 3, 1)
        x = F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class CNBlock(nn.Module):
    """Depthwise convolution, then a perceptron over the last axis; features come back as channels-last memory."""

    def __init__(self, dim: int, layer_scale: float = 0.1) -> None:
        super().__init__()
        self.dwconv = nn.Conv2d(dim, dim, kernel_size=7, padding=3, groups=dim)
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.pwconv1, self.act, self.pwconv2 = nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim)
        self.gamma = nn.Parameter(layer_scale * torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x
        x = self.dwconv(x).permute(0, 2, 3, 1)
        x = self.pwconv2(self.act(self.pwconv1(self.norm(x)))) * self.gamma
        return x.permute(0, 3, 1, 2) + shortcut


class ConvNeXt(nn.Module):
    """Features lie in memory as channels-last, from the stem on."""

    def __init__(self, num_classes: int = 3) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, kernel_size=2, stride=2), LayerNorm2d(8, eps=1e-6))
        self.stages = nn.Sequential(CNBlock(8), CNBlock(8))
        self.norm = nn.LayerNorm(8, eps=1e-6)
        self.head = nn.Linear(8, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stages(self.stem(x.contiguous(memory_format=torch.channels_last)))
        return self.head(self.norm(x.mean([-2, -1])))


class BasicConv2d(nn.Module):
    """Convolution, BatchNorm, functional in-place ReLU."""

    def __init__(self, in_channels: int, out_channels: int, **kwargs: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, bias=False, **kwargs)
        self.bn = nn.BatchNorm2d(out_channels, eps=0.001)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(x)), inplace=True)


class Inception(nn.Module):
    """Four branches side by side."""

    def __init__(self, in_channels: int) -> None:
        super().__init__()
        self.branch1 = BasicConv2d(in_channels, 4, kernel_size=1)
        self.branch2 = nn.Sequential(
            BasicConv2d(in_channels, 4, kernel_size=1), BasicConv2d(4, 4, kernel_size=3, padding=1)
        )
        self.branch3 = nn.Sequential(
            BasicConv2d(in_channels, 2, kernel_size=1), BasicConv2d(2, 4, kernel_size=3, padding=1)
        )
        self.branch4 = nn.Sequential(
            nn.MaxPool2d(kernel_size=3, stride=1, padding=1, ceil_mode=True), BasicConv2d(in_channels, 4, kernel_size=1)
        )

    def _forward(self, x: Tensor) -> list[Tensor]:
        return [self.branch1(x), self.branch2(x), self.branch3(x), self.branch4(x)]

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat(self._forward(x), 1)


class GoogLeNet(nn.Module):
    """In training the outputs are (logits, auxiliary logits), in evaluation logits."""

    def __init__(self, num_classes: int = 3) -> None:
        super().__init__()
        self.conv1 = BasicConv2d(3, 8, kernel_size=3, padding=1)
        self.inception3a = Inception(8)
        self.maxpool = nn.MaxPool2d(2)
        self.inception3b = Inception(16)
        self.aux = nn.Sequential(nn.AdaptiveAvgPool2d((1, 1)), nn.Flatten(), nn.Linear(16, num_classes))
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.dropout = nn.Dropout(0.2)
        self.fc = nn.Linear(16, num_classes)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        x = self.inception3a(self.conv1(x))
        aux = self.aux(x) if self.training else None
        x = self.inception3b(self.maxpool(x))
        x = self.fc(self.dropout(torch.flatten(self.avgpool(x), 1)))
        return x if aux is None else (x, aux)


def main_outputs(outputs: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    """The logits of a network with an auxiliary classifier."""
    return outputs[0] if isinstance(outputs, tuple) else outputs


class RegBlock(nn.Module):
    """Of RegNetY: a bottleneck with groups, squeeze and excitation."""

    def __init__(self, width_in: int, width_out: int, stride: int, group_width: int) -> None:
        super().__init__()
        self.proj: nn.Module | None = None
        if width_in != width_out or stride != 1:
            self.proj = nn.Sequential(nn.Conv2d(width_in, width_out, 1, stride, bias=False), nn.BatchNorm2d(width_out))
        self.f = nn.Sequential()
        self.f.add_module(
            "a",
            nn.Sequential(
                nn.Conv2d(width_in, width_out, 1, bias=False), nn.BatchNorm2d(width_out), nn.ReLU(inplace=True)
            ),
        )
        self.f.add_module(
            "b",
            nn.Sequential(
                conv3x3(width_out, width_out, stride, width_out // group_width),
                nn.BatchNorm2d(width_out),
                nn.ReLU(inplace=True),
            ),
        )
        self.f.add_module("se", SqueezeExcitation(width_out, 2, nn.Sigmoid))
        self.f.add_module("c", nn.Sequential(nn.Conv2d(width_out, width_out, 1, bias=False), nn.BatchNorm2d(width_out)))
        self.activation = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.proj(x) + self.f(x) if self.proj is not None else x + self.f(x)
        return self.activation(x)


class RegNet(nn.Module):
    """Blocks in an `nn.Sequential` with names that hold hyphens: block1-0."""

    def __init__(self, num_classes: int = 3) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv3x3(3, 8, 2), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.trunk_output = nn.Sequential()
        self.trunk_output.add_module("block1-0", RegBlock(8, 8, 1, 4))
        self.trunk_output.add_module("block1-1", RegBlock(8, 16, 2, 4))
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(in_features=16, out_features=num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.avgpool(self.trunk_output(self.stem(x)))
        return self.fc(x.flatten(start_dim=1))


def drop_path(x: Tensor, drop_prob: float, training: bool) -> Tensor:
    """Stochastic depth as in timm."""
    if drop_prob == 0.0 or not training:
        return x
    keep_prob = 1 - drop_prob
    shape = (x.shape[0],) + (1,) * (x.ndim - 1)
    random_tensor = x.new_empty(shape).bernoulli_(keep_prob)
    return x * random_tensor.div_(keep_prob)


class DropPath(nn.Module):
    """See `drop_path`."""

    def __init__(self, drop_prob: float = 0.0) -> None:
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x: Tensor) -> Tensor:
        return drop_path(x, self.drop_prob, self.training)


class Attention(nn.Module):
    """Of timm: one projection for queries, keys and values; `dropout_p` of the functional attention."""

    def __init__(self, dim: int, num_heads: int = 2, attn_drop: float = 0.1) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, dim // num_heads
        self.qkv = nn.Linear(dim, dim * 3)
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        x = F.scaled_dot_product_attention(q, k, v, dropout_p=self.attn_drop.p if self.training else 0.0)
        return self.proj(x.transpose(1, 2).reshape(B, N, C))


class ViTBlock(nn.Module):
    """Attention and a perceptron behind LayerNorms, with stochastic depth."""

    def __init__(self, dim: int, drop: float) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(dim, eps=1e-6), Attention(dim)
        self.drop_path1 = DropPath(drop) if drop > 0.0 else nn.Identity()
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path1(self.attn(self.norm1(x)))
        return x + self.drop_path1(self.mlp(self.norm2(x)))


class VisionTransformer(nn.Module):
    """Patches, a class token, positions that are drawn with `trunc_normal_`."""

    def __init__(self, dim: int = 16, num_classes: int = 3) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, dim, kernel_size=4, stride=4)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.randn(1, 5, dim) * 0.02)
        self.pos_drop = nn.Dropout(p=0.1)
        self.blocks = nn.Sequential(*[ViTBlock(dim, float(x)) for x in torch.linspace(0, 0.2, 2)])
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.head = nn.Linear(dim, num_classes)
        nn.init.trunc_normal_(self.pos_embed, std=0.02)
        nn.init.normal_(self.cls_token, std=1e-6)

    def forward_features(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), dim=1)
        return self.norm(self.blocks(self.pos_drop(x + self.pos_embed)))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.forward_features(x)[:, 0])


class WindowAttention(nn.Module):
    """Of Swin: a table of relative positions, indexed by a buffer of integers."""

    def __init__(self, dim: int, window: int = 2, num_heads: int = 2) -> None:
        super().__init__()
        self.num_heads, self.scale = num_heads, (dim // num_heads) ** -0.5
        self.relative_position_bias_table = nn.Parameter(torch.zeros((2 * window - 1) * (2 * window - 1), num_heads))
        nn.init.trunc_normal_(self.relative_position_bias_table, std=0.02)
        coords = torch.flatten(
            torch.stack(torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")), 1
        )
        relative = (coords[:, :, None] - coords[:, None, :]).permute(1, 2, 0) + window - 1
        relative[:, :, 0] *= 2 * window - 1
        self.register_buffer("relative_position_index", relative.sum(-1))
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.softmax = nn.Softmax(dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        B_, N, C = x.shape
        qkv = self.qkv(x).reshape(B_, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0] * self.scale, qkv[1], qkv[2]
        bias = self.relative_position_bias_table[self.relative_position_index.view(-1)].view(N, N, -1)
        attn = self.softmax(q @ k.transpose(-2, -1) + bias.permute(2, 0, 1).unsqueeze(0))
        return self.proj((attn @ v).transpose(1, 2).reshape(B_, N, C))


class SwinBlock(nn.Module):
    """Windows of [B, H, W, C], shifted by `torch.roll` in every other block."""

    def __init__(self, dim: int, shift: int, window: int = 2) -> None:
        super().__init__()
        self.shift, self.window = shift, window
        self.norm1, self.attn = nn.LayerNorm(dim), WindowAttention(dim, window)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        B, H, W, C = x.shape
        w = self.window
        h = torch.roll(self.norm1(x), (-self.shift, -self.shift), (1, 2)) if self.shift else self.norm1(x)
        windows = h.view(B, H // w, w, W // w, w, C).permute(0, 1, 3, 2, 4, 5).reshape(-1, w * w, C)
        h = self.attn(windows).view(B, H // w, W // w, w, w, C).permute(0, 1, 3, 2, 4, 5).reshape(B, H, W, C)
        x = x + (torch.roll(h, (self.shift, self.shift), (1, 2)) if self.shift else h)
        return x + self.mlp(self.norm2(x))


class PatchMerging(nn.Module):
    """Half the height and width, twice the channels; gives tokens [B, T, D]."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.reduction, self.norm = nn.Linear(4 * dim, 2 * dim, bias=False), nn.LayerNorm(4 * dim)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([x[:, 0::2, 0::2], x[:, 1::2, 0::2], x[:, 0::2, 1::2], x[:, 1::2, 1::2]], -1)
        return self.reduction(self.norm(x)).flatten(1, 2)


class Swin(nn.Module):
    """[B, 3, 8, 8] -> patches [B, 4, 4, 8] -> tokens [B, 4, 16] -> logits."""

    def __init__(self, num_classes: int = 3) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, 8, kernel_size=2, stride=2)
        self.layers = nn.Sequential(SwinBlock(8, 0), SwinBlock(8, 1))
        self.merge = PatchMerging(8)
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(self.patch_embed(x).permute(0, 2, 3, 1))
        return self.head(self.norm(self.merge(x)).mean(dim=1))


class DoubleConv(nn.Module):
    """(convolution, BatchNorm, ReLU) twice."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.double_conv = nn.Sequential(
            conv3x3(in_channels, out_channels), nn.BatchNorm2d(out_channels), nn.ReLU(inplace=True),
            conv3x3(out_channels, out_channels), nn.BatchNorm2d(out_channels), nn.ReLU(inplace=True),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.double_conv(x)


class UNet(nn.Module):
    """Skips around the bottom, a transposed convolution on the way up; one logit for each pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.inc, self.down, self.bottom = DoubleConv(3, 4), DoubleConv(4, 8), DoubleConv(8, 16)
        self.up1 = nn.ConvTranspose2d(16, 8, kernel_size=2, stride=2)
        self.conv1 = DoubleConv(16, 8)
        self.up2 = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)
        self.conv2 = DoubleConv(12, 4)
        self.outc = nn.Conv2d(4, 1, kernel_size=1)

    def forward(self, x: Tensor) -> Tensor:
        x1 = self.inc(x)
        x2 = self.down(F.max_pool2d(x1, 2))
        x3 = self.bottom(F.max_pool2d(x2, 2))
        x = self.up1(x3)
        x = F.pad(x, [0, x2.size(3) - x.size(3), 0, x2.size(2) - x.size(2)])
        x = self.conv1(torch.cat([x2, x], dim=1))
        x = self.conv2(torch.cat([x1, self.up2(x)], dim=1))
        return self.outc(x)


def pixel_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Binary cross-entropy of each image, the mean of its pixels [B]."""
    return F.binary_cross_entropy_with_logits(outputs, targets, reduction="none").flatten(1).mean(dim=1)


NETWORKS = [
    Published(name="VGG", style="torchvision", model=VGG, slots=["features.0", "features.3"], data=images,
              random=True, shows="in-place ReLU right behind slots, Dropout"),
    Published(name="ResNet basic", style="torchvision", model=partial(ResNet, BasicBlock, (1, 1)),
              slots=["bn1", "layer1", "layer2.0"], data=images,
              shows="one in-place ReLU used twice, `out += identity`"),
    Published(name="ResNet bottleneck", style="torchvision", model=partial(ResNet, Bottleneck, (1, 1)),
              slots=["layer1.0", "layer2.0.bn2"], data=images, shows="slot inside a block, in-place ReLU behind it"),
    Published(name="ResNeXt", style="torchvision", model=partial(ResNet, Bottleneck, (1, 2), 2),
              slots=["layer1", "layer2.0"], data=images, shows="groups"),
    Published(name="DenseNet", style="torchvision", model=DenseNet,
              slots=["features.conv0", "features.denseblock1", "features.transition1"], data=images, random=True,
              shows="lists of features, functional dropout, an nn.ModuleDict with forward"),
    Published(name="MobileNetV3", style="torchvision", model=MobileNetV3, slots=["depthwise", "project"], data=images,
              random=True, shows="in-place Hardswish behind a slot, squeeze and excitation, in-place Dropout"),
    Published(name="EfficientNet", style="torchvision", model=EfficientNet, slots=["features.0", "features.1"],
              data=images, random=True, shows="stochastic depth drawn in forward, `result += x`"),
    Published(name="ConvNeXt", style="torchvision", model=ConvNeXt, slots=["stem", "stages.0"], data=images,
              shows="permute and LayerNorm, layer scale, channels-last memory"),
    Published(name="GoogLeNet", style="torchvision", model=GoogLeNet, slots=["inception3a", "inception3b"], data=images,
              options={"outputs": main_outputs}, random=True, shows="(logits, auxiliary logits) in training only"),
    Published(name="RegNet", style="torchvision", model=RegNet, slots=["stem", "trunk_output.block1-0"], data=images,
              shows="names with hyphens"),
    Published(name="Vision Transformer", style="timm", model=VisionTransformer, slots=["pos_drop", "blocks.0"],
              data=images, random=True, shows="class token, positions, drop_path, attention's dropout_p"),
    Published(name="Swin", style="timm", model=Swin, slots=["patch_embed"], data=images,
              shows="windows, relative positions indexed by a buffer"),
    Published(name="U-Net", style="Pytorch-UNet", model=UNet, slots=["inc", "down", "conv1"], data=masks,
              options={"loss": pixel_loss}, shows="skips, transposed convolution, one target for each pixel"),
]  # fmt: skip
