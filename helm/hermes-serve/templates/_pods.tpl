{{/* Parts that pods share. */}}

{{/* Labels and annotations: (dict "root" $ "component" "redis" "own" .Values.uninstall "annotations" (dict "a" "b")).
     `own` has podLabels and podAnnotations that precede those of all pods; both it and `annotations` may be missing. */}}
{{- define "hermes.podMetadata" -}}
{{- $own := .own | default dict -}}
labels:
  {{- include "hermes.component" (list .root .component) | nindent 2 }}
  {{- with merge (dict) ($own.podLabels | default dict) (.root.Values.podLabels | default dict) }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with merge (dict) (.annotations | default dict) ($own.podAnnotations | default dict) (.root.Values.podAnnotations | default dict) }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* A pod's security context: (dict "root" $ "id" 10001 "own" .Values.redis.internal); `own` may be missing. */}}
{{- define "hermes.podSecurity" -}}
{{- $profile := dict "type" "RuntimeDefault" -}}
{{- $ids := dict "runAsUser" .id "runAsGroup" .id "fsGroup" .id "fsGroupChangePolicy" "OnRootMismatch" -}}
{{- $default := merge (dict "runAsNonRoot" true "seccompProfile" $profile) $ids -}}
{{ include "hermes.security" (dict "name" "podSecurityContext" "default" $default "places" (list .root.Values .own)) }}
{{- end }}

{{/* A container's: (dict "root" $ "own" .Values.redis.internal) */}}
{{- define "hermes.containerSecurity" -}}
{{- $profile := dict "type" "RuntimeDefault" -}}
{{- $rights := dict "allowPrivilegeEscalation" false "capabilities" (dict "drop" (list "ALL")) -}}
{{- $default := merge (dict "readOnlyRootFilesystem" true "runAsNonRoot" true "seccompProfile" $profile) $rights -}}
{{ include "hermes.security" (dict "name" "securityContext" "default" $default "places" (list .root.Values .own)) }}
{{- end }}

{{/* The default, unless one of the places has a map of this name, even an empty one; the last place counts. */}}
{{- define "hermes.security" -}}
{{- $chosen := .default -}}
{{- range .places }}
{{- if kindIs "map" (get (. | default dict) $.name) }}{{ $chosen = get . $.name }}{{ end -}}
{{- end -}}
{{- with $chosen -}}
securityContext:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Requests, and limits of what cannot be shared: (dict "root" $ "cpus" 2 "memory" "4Gi" "gpus" 1) */}}
{{- define "hermes.resources" -}}
resources:
  requests:
    cpu: {{ .cpus | quote }}
    memory: {{ .memory }}
  limits:
    memory: {{ .memory }}
    {{- if .root.Values.cpuLimits }}
    cpu: {{ .cpus | quote }}
    {{- end }}
    {{- if .gpus }}
    {{ .root.Values.engines.gpuResource }}: {{ .gpus | quote }}
    {{- end }}
{{- end }}

{{- define "hermes.scheduling" -}}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .topologySpreadConstraints }}
topologySpreadConstraints:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- end }}

{{/* `scheduling` of a pod of which there is only one (the head, Redis): by default Kubernetes would leave it on a dead node
     for five minutes. */}}
{{- define "hermes.soonElsewhere" -}}
{{- $scheduling := deepCopy (. | default dict) -}}
{{- range list "unreachable" "not-ready" }}
{{- $toleration := dict "key" (print "node.kubernetes.io/" .) "operator" "Exists" "effect" "NoExecute" "tolerationSeconds" 30 }}
{{- $_ := set $scheduling "tolerations" (append ($scheduling.tolerations | default list) $toleration) }}
{{- end -}}
{{ toYaml $scheduling }}
{{- end }}
